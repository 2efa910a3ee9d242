"""Generated projects, and the commands that people type in and around them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from cookiecutter.main import cookiecutter

from tests import ROOT

SOURCE = ROOT / "{{cookiecutter.project_slug}}"
PACKAGE = SOURCE / "{{cookiecutter.package_name}}"
LIBRARY = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
VERSION = LIBRARY["version"]
# Variables of a `make test` that this test runs under.
OUTER = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "RUN", "VENV", "ARGS", "CONFIG"}

for role in ("AUTHOR", "COMMITTER"):  # git's, on a machine that does not know its user
    for key in ("NAME", "EMAIL"):
        os.environ.setdefault(f"GIT_{role}_{key}", "ada@example.org")


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as a shell in the folder `cwd` does."""
    env = {name: value for name, value in os.environ.items() if name not in OUTER}
    env |= {"PWD": str(cwd)} | environment
    options: Any = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, cwd=cwd, env=env, **options)


def output(*command: str, cwd: Path, **environment: str) -> str:
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout.strip()


def git(folder: Path, *arguments: str) -> str:
    return output("git", *arguments, cwd=folder)


def commit(folder: Path, message: str) -> None:
    """Commits all files of a folder, as a repository of its own."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "-m", message)


def edit(path: Path, old: str, new: str) -> None:
    """Replaces a text that the file has, or with old="" appends one."""
    text = path.read_text("utf-8")
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new) if old else text + new, "utf-8")


@dataclass(frozen=True)
class BakedProject:
    path: Path

    @property
    def package(self) -> str:
        return next(self.path.glob("*/__main__.py")).parent.name

    @property
    def files(self) -> dict[str, Path]:
        """Files by their path in the project, sorted."""
        found = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path for path in found}

    @property
    def contents(self) -> dict[str, tuple[bytes, bool]]:
        """Content of every file, without lines that name the template's place, and whether it is
        executable."""
        place = re.compile(rb'^.*(?:file://|"template":).*$', re.MULTILINE)
        texts = {name: place.sub(b"", path.read_bytes()) for name, path in self.files.items()}
        return {name: (texts[name], os.access(path, os.X_OK)) for name, path in self.files.items()}

    def read(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")


def bake_into(folder: Path, template: Path = ROOT, /, **answers: str) -> BakedProject:
    options: Any = {"output_dir": str(folder), "default_config": True, "no_input": True}
    return BakedProject(Path(cookiecutter(str(template), extra_context=answers, **options)))


def bake_from(address: str, folder: Path, checkout: str | None = None, **answers: Any) -> Path:
    """Clones the template into `folder`, away from the user's clones, and generates a project."""
    settings = folder / "cookiecutter.yaml"
    settings.write_text(f"cookiecutters_dir: {folder}/clones\nreplay_dir: {folder}/replay\n")
    options: Any = {"output_dir": str(folder / "out"), "config_file": str(settings)}
    options |= {"no_input": True, "extra_context": answers}
    return Path(cookiecutter(address, checkout=checkout, **options))


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
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    commit(folder, "all")
    git(folder, "tag", "v1")
    return folder


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


def fit(folder: Path, flags: str) -> None:
    """Trains that project on its texts with two processes."""
    flags = f"""--run.root {folder}/runs --data.source TextFiles --data.tokenizer Bytes
        --data.source.paths [{folder}/texts/*.txt] --data.seq_len 32 --data.validation_share 0.2
        --data.test_share 0 --data.global_batch_size 8 --data.micro_batch_size 2
        --model.sample_tokens 4 --trainer.accelerator cpu --trainer.devices 2
        --trainer.val_check_interval 4 --trainer.log_every_n_steps 1 {flags}"""
    command = [sys.executable, "-m", "trainer_dev", "fit", *shlex.split(flags)]
    output(*command, cwd=folder, DS_ACCELERATOR="cpu")
