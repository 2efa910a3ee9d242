"""The library is a package of its own: what is in it, what it needs, and where a generated project
gets it from."""

from __future__ import annotations

import ast
import glob
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from .conftest import ROOT, BakedProject, bake_from, run

LIBRARY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = LIBRARY["version"]


def pip(*arguments: str, cwd: Path = ROOT) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    settings = os.environ | {"PWD": str(cwd)}  # as a shell does it
    done = subprocess.run(
        command, cwd=cwd, env=settings, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pin_of(project: Path) -> str:
    chosen = tomllib.loads((project / "pyproject.toml").read_text())
    return chosen["tool"]["environment"]["library"]


def test_the_version_is_the_one_of_the_template(default: BakedProject) -> None:
    assert json.loads((ROOT / "cookiecutter.json").read_text())["_version"] == VERSION
    project = tomllib.loads(default.read("pyproject.toml"))["project"]
    assert project["dependencies"] == ["dist-template[all]"]


@pytest.mark.slow
def test_a_wheel_holds_the_library_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"  # where pip leaves its build/ folder
    shutil.copytree(repository, source)
    # As `make docs` writes it.
    (source / "docs" / "reference.md").write_text("# Configuration reference\n")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source))
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    files = (source / "src" / "dist_template").rglob("*.*")
    library = {path.relative_to(source / "src").as_posix() for path in files}
    assert {each for each in names if not re.match(r"[^/]*\.(dist-info|data)/", each)} == library
    docs = source / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    shared = [each.partition("/share/doc/dist-template/")[2] for each in names if ".data/" in each]
    assert set(shared) == pages
    assert {"dist_template/py.typed", "dist_template/configs/strategy/fsdp2.yaml"} <= library
    suffixes = {".py", ".typed", ".css", ".html", ".json", ".template", ".yaml"}
    assert {Path(name).suffix for name in library} == suffixes


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


# ---- where a project gets it from ----------------------------------------------------------------


def test_a_project_from_a_folder_uses_the_library_in_that_folder(
    default: BakedProject, tmp_path: Path
) -> None:
    assert pin_of(default.path) == f"dist-template @ {ROOT.as_uri()}/"
    command = [sys.executable, "-m", "cookiecutter", ".", "--no-input", "--default-config"]
    command += ["-o", str(tmp_path)]
    settings = os.environ | {"PWD": str(ROOT)}  # as a shell does it
    subprocess.run(command, cwd=ROOT, env=settings, check=True, capture_output=True)
    assert pin_of(tmp_path / "my-trainer") == pin_of(default.path)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["localhost", ""])
def test_a_project_from_git_pins_the_tag_or_the_commit(
    repository: Path, tmp_path: Path, host: str
) -> None:
    asked, address = f"git+file://{host}{repository}", f"git+file://localhost{repository}"
    by_tag = pin_of(bake_from(asked, tmp_path, "v1").path)
    assert by_tag == f"dist-template @ {address}@v1"
    commit = run("git", "rev-parse", "HEAD", cwd=repository).stdout.strip()
    shutil.rmtree(tmp_path / "out")
    project = bake_from(asked, tmp_path)
    assert pin_of(project.path) == f"dist-template @ {address}@{commit}"
    lock = tmp_path / "lock.txt"
    lock.write_text(by_tag)
    dry = "install --dry-run --no-deps --no-build-isolation --ignore-installed -r"
    assert f"Would install dist-template-{VERSION}" in pip(*dry.split(), str(lock))
    page = project.read("README.md")
    assert "localhost" in page and f"/blob/{commit}/docs/index.md)" in page


REPOSITORY = "example.org/my/repo"
ADDRESSES = [  # what was asked for, what is pinned
    (f"https://me:secret@{REPOSITORY}.git", f"https://{REPOSITORY}.git"),
    ("git@example.org:my/repo.git", f"ssh://git@{REPOSITORY}.git"),
]


@pytest.mark.parametrize(("asked", "pinned"), ADDRESSES)
def test_an_address_becomes_one_that_pip_reads_and_holds_no_password(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, pinned: str
) -> None:
    # git goes to the local repository, and believes in the address
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://localhost{repository}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", asked)
    project = bake_from(asked, tmp_path, "v1")
    assert pin_of(project.path) == f"dist-template @ git+{pinned}@v1"
    assert f"[Documentation](https://{REPOSITORY}/blob/v1/docs/index.md)" in project.read(
        "README.md"
    )
    assert json.loads(project.read(".cruft.json"))["template"] == pinned


def test_a_published_version_is_pinned_by_its_number(repository: Path, tmp_path: Path) -> None:
    released = shutil.copytree(repository, tmp_path / "released")
    subprocess.run(["git", "tag", f"v{VERSION}"], cwd=released, check=True, capture_output=True)
    project = bake_from(f"git+file://localhost{released}", tmp_path, f"v{VERSION}", published=True)
    assert pin_of(project.path) == f"dist-template=={VERSION}"


def test_dockerfile_copies_what_there_is(default: BakedProject) -> None:
    text = default.read("Dockerfile")
    lines = [line.split()[:-1] for line in re.findall(r"(?m)^COPY (.*)$", text)]
    sources = {word for line in lines for word in line if not word.startswith("--")}
    assert {"environment.py", "lock-*.txt", "Makefile", "my_trainer", "configs"} <= sources
    # [x] at the end: may be missing, and COPY takes the others of its line
    for source in sources - {"wheel[s]", "vendor/dist-templat[e]"}:
        assert glob.glob(source, root_dir=default.path), source
    assert re.findall(r"make (\w+)", text) == ["setup"]
