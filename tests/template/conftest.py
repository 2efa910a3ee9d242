"""`bake(**answers)`: a generated project, by cookiecutter's own API and without prompts."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    options: Any = {"output_dir": str(folder), "default_config": True, "no_input": True}
    path = Path(cookiecutter(str(template), extra_context=answers, **options))
    return BakedProject(path, next(path.glob("*/__main__.py")).parent.name)


def bake_from(
    address: str, folder: Path, checkout: str | None = None, published: bool = False
) -> BakedProject:
    """Clones the template into `folder`, away from the user's clones, and generates a project."""
    settings = folder / "cookiecutter.yaml"
    places = f"cookiecutters_dir: {folder / 'clones'}\nreplay_dir: {folder / 'replay'}\n"
    settings.write_text(places)
    options: Any = {"output_dir": str(folder / "out"), "config_file": str(settings)}
    options |= {"no_input": True, "extra_context": {"_published": published}}
    return BakedProject(Path(cookiecutter(address, checkout=checkout, **options)), "my_trainer")


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
    names = run(*listed, cwd=ROOT)
    if names.returncode:
        pytest.skip("this is not a git checkout")
    folder = tmp_path_factory.mktemp("git") / "template"
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    who = "-c user.name=Ada -c user.email=ada@example.org"
    for command in ("init -q", "add --all", f"{who} commit -q -m all", "tag v1"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)
    return folder


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    options: Any = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, **options)


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


def make(project: BakedProject, *arguments: str, path: str | None = None) -> Any:
    """Without the variables of a `make test` that this test runs under and this checkout's src."""
    settings = {key: value for key, value in os.environ.items() if key not in OUTER}
    settings |= {"PATH": path} if path else {}
    options: Any = {"text": True, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    command = ["make", *arguments]
    return subprocess.run(
        command, cwd=project.path, env=settings, stdout=subprocess.PIPE, **options
    )


def copied_project(folder: Path) -> Path:
    """The project's files with the package trainer_dev, and thirty texts in texts/."""
    caches = shutil.ignore_patterns("__pycache__")
    for name in ("configs", "tests", PACKAGE.name):
        copy = folder / ("trainer_dev" if name == PACKAGE.name else name)
        shutil.copytree(SOURCE / name, copy, ignore=caches)
    (folder / "texts").mkdir()
    for number in range(30):
        text = f"{number} is a number of some length. " * 30
        (folder / "texts" / f"{number}.txt").write_text(text, "utf-8")
    return folder


def fit(folder: Path, flags: str, code: int = 0, **environment: str) -> None:
    """Trains that project on its texts with two processes."""
    flags = f"""--run.root {folder}/runs --data.source TextFiles --data.tokenizer Bytes
        --data.source.paths [{folder}/texts/*.txt] --data.seq_len 32 --data.validation_share 0.2
        --data.test_share 0 --data.global_batch_size 8 --data.micro_batch_size 2
        --model.sample_tokens 4 --trainer.accelerator cpu --trainer.devices 2
        --trainer.val_check_interval 4 --trainer.log_every_n_steps 1 {flags}"""
    other = ("WANDB_", "DIST_RUN_ID")
    settings = {name: value for name, value in os.environ.items() if not name.startswith(other)}
    settings |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **environment}
    command = [sys.executable, "-m", "trainer_dev", "fit", *shlex.split(flags)]
    options: Any = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=folder, env=settings, **options)
    assert done.returncode == code, done.stdout + done.stderr
