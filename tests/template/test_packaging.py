"""What the library needs, and where a generated project gets it from."""

import ast
import importlib.metadata
import json
import re
import shutil
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from .conftest import LIBRARY, ROOT, VERSION, BakedProject, bake_from, git, output, run


def pin_of(project: Path) -> str:
    chosen = tomllib.loads((project / "pyproject.toml").read_text())
    assert chosen["project"]["dependencies"] == ["dist-template[all]"]
    return chosen["tool"]["environment"]["library"]


def test_what_is_imported_with_the_library_is_required_by_it() -> None:
    """Imports at the top of a module; what extras bring is imported late, or by a wing alone."""
    required = {re.split(r"[^\w.-]", each)[0].lower() for each in LIBRARY["dependencies"]}
    of_wings = {"jinja2", "optuna", "starlette"}  # the extras sweep and serve
    found: dict[str, str] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                found[str(node.module).split(".")[0]] = str(path)
            elif isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0]: str(path) for alias in node.names}
    owners = importlib.metadata.packages_distributions()
    known = {name for name in owners if required & {owner.lower() for owner in owners[name]}}
    lacking = found.keys() - sys.stdlib_module_names - known
    assert "torch" in found and lacking <= of_wings
    for name in lacking:
        assert "/wings/" in found[name] or found[name].endswith("transformers_serving.py"), name


def test_a_project_from_a_folder_uses_its_library(default: BakedProject, tmp_path: Path) -> None:
    assert pin_of(default.path) == f"dist-template @ {ROOT.as_uri()}/"
    command = ["cookiecutter", ".", "--no-input", "--default-config", "-o", str(tmp_path)]
    output(sys.executable, "-m", *command, cwd=ROOT)
    assert pin_of(tmp_path / "my-trainer") == pin_of(default.path)


@pytest.mark.slow
def test_a_project_from_git_pins_the_commit_for_pip(repository: Path, tmp_path: Path) -> None:
    project = bake_from(f"git+file://{repository}", tmp_path)
    head = git(repository, "rev-parse", "HEAD")
    assert pin_of(project) == f"dist-template @ git+file://localhost{repository}@{head}"
    dry = "install --dry-run --no-deps --no-build-isolation --ignore-installed"
    printed = output(sys.executable, "-m", "pip", *dry.split(), pin_of(project), cwd=tmp_path)
    assert f"Would install dist-template-{VERSION}" in printed
    page = (project / "README.md").read_text()
    assert "localhost" in page and f"/blob/{head}/docs/index.md)" in page


REPOSITORY = "example.org/my/repo"
ADDRESSES = [  # what was asked for, what is pinned
    (f"https://me:secret@{REPOSITORY}.git", f"https://{REPOSITORY}.git"),
    ("git@example.org:my/repo.git", f"ssh://git@{REPOSITORY}.git"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "pinned"), ADDRESSES)
def test_an_address_becomes_one_that_pip_reads_and_holds_no_password(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, pinned: str
) -> None:
    # git goes to the local repository, and believes in the address
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://localhost{repository}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", asked)
    project = bake_from(asked, tmp_path, "v1")
    assert pin_of(project) == f"dist-template @ git+{pinned}@v1"
    page = (project / "README.md").read_text()
    assert f"[Documentation](https://{REPOSITORY}/blob/v1/docs/index.md)" in page
    assert json.loads((project / ".cruft.json").read_text())["template"] == pinned


@pytest.mark.slow
def test_a_published_version_is_pinned_by_its_number(repository: Path, tmp_path: Path) -> None:
    released = Path(shutil.copytree(repository, tmp_path / "released"))
    git(released, "tag", f"v{VERSION}")
    project = bake_from(f"git+file://{released}", tmp_path, f"v{VERSION}", _published=True)
    assert pin_of(project) == f"dist-template=={VERSION}"


@pytest.mark.slow
def test_the_archive_of_a_release_pins_its_tag(repository: Path, tmp_path: Path) -> None:
    address, archive = f"git+file://localhost{repository}", tmp_path / "my-trainer.tar.gz"
    for source in (str(repository), address):
        command = ["make", "starter", "READY=", f"OUT={tmp_path}", f"FROM={source}", "TAG=v1"]
        done = run(*command, cwd=ROOT, HOME=str(tmp_path))
        is_made = source == address
        assert (done.returncode == 0) == archive.exists() == is_made, done.stdout + done.stderr
        assert ("is a folder, which other machines do not have" in done.stdout) != is_made
    assert {"my-trainer/Makefile", "my-trainer/lock-cpu.txt"} <= {*tarfile.open(archive).getnames()}
    assert pin_of(tmp_path / "starter" / "my-trainer") == f"dist-template @ {address}@v1"
