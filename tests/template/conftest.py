"""`bake(**answers)`: a generated project, by cookiecutter's own API and without prompts."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
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
        """Content hash, without the lines that say where the template was, and executable bit of
        every file."""
        found = {}
        for name, path in self.files.items():
            lines = path.read_bytes().splitlines()
            origin = (b"file://", b'"template":', b'"commit":', b'"checkout":')
            lines = [line for line in lines if not any(word in line for word in origin)]
            found[name] = (
                hashlib.sha256(b"\n".join(lines)).hexdigest(),
                bool(path.stat().st_mode & 0o100),
            )
        return found

    def read(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")


Bake = Callable[..., BakedProject]


def bake_into(folder: Path, template: Path = ROOT, /, **answers: str) -> BakedProject:
    path = Path(
        cookiecutter(
            str(template),
            no_input=True,
            extra_context=answers,
            output_dir=str(folder),
            default_config=True,
        )
    )
    return BakedProject(path, next(path.glob("*/__main__.py")).parent.name)


def bake_from(
    address: str, folder: Path, checkout: str | None = None, published: bool = False
) -> BakedProject:
    """Clones the template into `folder`, away from the clones of whoever runs the tests, and
    generates a project."""
    settings = folder / "cookiecutter.yaml"
    settings.write_text(
        f"cookiecutters_dir: {folder / 'clones'}\nreplay_dir: {folder / 'replay'}\n"
    )
    answers, out = {"_published": published}, str(folder / "out")
    path = cookiecutter(
        address,
        checkout=checkout,
        no_input=True,
        extra_context=answers,
        config_file=str(settings),
        output_dir=out,
    )
    return BakedProject(Path(path), "my_trainer")


@pytest.fixture
def bake(tmp_path: Path) -> Bake:
    def baker(**answers: str) -> BakedProject:
        return bake_into(tmp_path / "bakes", **answers)

    return baker


@pytest.fixture(scope="session")
def default(tmp_path_factory: pytest.TempPathFactory) -> BakedProject:
    """The project that the default answers give; tests only read it."""
    return bake_into(tmp_path_factory.mktemp("default"))


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with what would be committed here now, in one commit that is tagged v1."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("this is not a git checkout")
    folder = tmp_path_factory.mktemp("git") / "template"
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    for command in (
        ["init", "-q"],
        ["add", "--all"],
        [*who, "commit", "-q", "-m", "all"],
        ["tag", "v1"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = os.environ | environment
    return subprocess.run(
        command, cwd=cwd, env=settings, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def assert_valid(project: BakedProject) -> None:
    """Files parse, nothing of the template is left in them, Python compiles, shell scripts too."""
    for name, path in project.files.items():
        text = path.read_text(encoding="utf-8")
        assert "cookiecutter." not in name + text, f"{name} holds an answer that was not filled in"
        if name.endswith((".yaml", ".yml")):
            yaml.safe_load(text)
        if name.endswith(".toml"):
            tomllib.loads(text)
        if name.endswith(".py"):
            compile(text, name, "exec")
        if name.endswith(".sh"):
            assert path.stat().st_mode & 0o100, f"{name} is not executable"
            assert run("bash", "-n", name, cwd=project.path).returncode == 0


OUTER = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "RUN", "VENV", "ARGS", "CONFIG", "PYTHONPATH"}


def make(
    project: BakedProject, *arguments: str, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    # Without the variables of a `make test` that this test runs under, and without this checkout's
    # src/.
    settings = {key: value for key, value in os.environ.items() if key not in OUTER}
    return subprocess.run(
        ["make", *arguments],
        cwd=project.path,
        env=settings | ({"PATH": path} if path else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )
