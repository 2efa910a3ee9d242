"""Packages that are registered by their metadata, as pip writes it, without an installation."""

from collections.abc import Mapping
from pathlib import Path


def write_metadata(folder: Path, package: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Writes a package's metadata into `folder`, on sys.path; group -> name -> entry point."""
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
