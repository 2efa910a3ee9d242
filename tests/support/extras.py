"""Packages: a Python without the extras', and some that their metadata registers alone."""

from collections.abc import Mapping
from pathlib import Path

EXTRAS = """bitsandbytes datasets deepspeed fastapi openai peft plotly optuna s3fs tensorboard
uvicorn wandb""".split()


def without_extras(folder: Path) -> str:
    """Writes into `folder` what hides the packages, and returns it as an entry of PYTHONPATH."""
    hides = f"import sys\nsys.modules |= dict.fromkeys({EXTRAS})\n"
    (folder / "sitecustomize.py").write_text(hides)
    return str(folder)


def write_metadata(folder: Path, package: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Writes a package's metadata into `folder`, on sys.path; group -> name -> entry point."""
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
