"""`bake(**answers)`: a generated project, by cookiecutter's own API and without prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "{{cookiecutter.project_slug}}"
PACKAGE = SOURCE / "{{cookiecutter.package_name}}"


@dataclass(frozen=True)
class BakedProject:
    path: Path
    package: str

    @property
    def files(self) -> dict[str, Path]:
        """Files by their path in the project, sorted."""
        found = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path for path in found}

    @property
    def digests(self) -> dict[str, tuple[str, bool]]:
        """Content hash and executable bit of every file."""
        return {
            name: (hashlib.sha256(path.read_bytes()).hexdigest(), bool(path.stat().st_mode & 0o100))
            for name, path in self.files.items()
        }

    def read(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")


Bake = Callable[..., BakedProject]


def bake_into(folder: Path, template: Path = ROOT, /, **answers: str) -> BakedProject:
    path = Path(
        cookiecutter(str(template), no_input=True, extra_context=answers, output_dir=str(folder), default_config=True)
    )
    return BakedProject(path, next(path.glob("*/__main__.py")).parent.name)


@pytest.fixture
def bake(tmp_path: Path) -> Bake:
    def baker(**answers: str) -> BakedProject:
        return bake_into(tmp_path / "bakes", **answers)

    return baker


@pytest.fixture(scope="session")
def default(tmp_path_factory: pytest.TempPathFactory) -> BakedProject:
    """The project that the default answers give; tests only read it."""
    return bake_into(tmp_path_factory.mktemp("default"))
