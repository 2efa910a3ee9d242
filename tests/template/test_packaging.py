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

from .conftest import ROOT, BakedProject, bake_from

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
    (source / "docs" / "reference.md").write_text(
        "# Configuration reference\n"
    )  # as `make docs` writes it
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source))
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    library = {
        path.relative_to(source / "src").as_posix()
        for path in (source / "src" / "dist_template").rglob("*.*")
    }
    assert {
        name for name in wheel.namelist() if not re.match(r"[^/]*\.(dist-info|data)/", name)
    } == library
    pages = {
        path.relative_to(source / "docs").as_posix() for path in (source / "docs").rglob("*.md")
    }
    assert {
        name.partition("/share/doc/dist-template/")[2]
        for name in wheel.namelist()
        if ".data/" in name
    } == pages
    assert {"dist_template/py.typed", "dist_template/configs/strategy/fsdp2.yaml"} <= library
    suffixes = {".py", ".typed", ".css", ".html", ".json", ".template", ".yaml"}
    assert {Path(name).suffix for name in library} == suffixes


def test_what_is_imported_with_the_library_is_required_by_it() -> None:
    """Imports at the top of a module; what an extra brings is imported where it is used, or by a
    wing alone."""
    required = {re.match(r"[\w.-]+", each).group().lower() for each in LIBRARY["dependencies"]}  # ty: ignore
    of_wings = {"jinja2", "optuna", "starlette"}  # the extras sweep and serve
    owners = importlib.metadata.packages_distributions()
    found: dict[str, str] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                found[str(node.module).split(".")[0]] = str(path)
            elif isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0]: str(path) for alias in node.names}
    lacking = {
        name: path
        for name, path in found.items()
        if name not in sys.stdlib_module_names
        and not required & {owner.lower() for owner in owners.get(name, [])}
    }
    assert "torch" in found and lacking.keys() <= of_wings
    assert all(
        "/wings/" in path or path.endswith("transformers_serving.py") for path in lacking.values()
    )


# ---- where a project gets it from ----------------------------------------------------------------


def test_a_project_from_a_folder_uses_the_library_in_that_folder(
    default: BakedProject, tmp_path: Path
) -> None:
    assert pin_of(default.path) == f"dist-template @ {ROOT.as_uri()}/"
    command = [
        sys.executable, "-m", "cookiecutter", ".", "--no-input", "--default-config", "-o",
        str(tmp_path),
    ]  # fmt: skip
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
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True
    ).stdout.strip()
    shutil.rmtree(tmp_path / "out")
    project = bake_from(asked, tmp_path)
    assert pin_of(project.path) == f"dist-template @ {address}@{commit}"
    lock = tmp_path / "lock.txt"
    lock.write_text(by_tag)
    plan = pip(
        "install",
        "--dry-run",
        "--no-deps",
        "--no-build-isolation",
        "--ignore-installed",
        "-r",
        str(lock),
    )
    assert f"Would install dist-template-{VERSION}" in plan
    assert "localhost" in project.read(
        "README.md"
    ) and f"/blob/{commit}/docs/index.md)" in project.read("README.md")


@pytest.mark.parametrize(
    ("asked", "pinned", "pages"),
    [
        (
            "https://me:secret@example.org/my/repo.git",
            "https://example.org/my/repo.git",
            "https://example.org/my/repo",
        ),
        (
            "git@example.org:my/repo.git",
            "ssh://git@example.org/my/repo.git",
            "https://example.org/my/repo",
        ),
    ],
)
def test_an_address_becomes_one_that_pip_reads_and_holds_no_password(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    pinned: str,
    pages: str,
) -> None:
    monkeypatch.setenv(
        "GIT_CONFIG_COUNT", "1"
    )  # git goes to the local repository, and believes in the address
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://localhost{repository}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", asked)
    project = bake_from(asked, tmp_path, "v1")
    assert pin_of(project.path) == f"dist-template @ git+{pinned}@v1"
    assert f"[Documentation]({pages}/blob/v1/docs/index.md)" in project.read("README.md")
    assert json.loads(project.read(".cruft.json"))["template"] == pinned


def test_a_published_version_is_pinned_by_its_number(repository: Path, tmp_path: Path) -> None:
    released = shutil.copytree(repository, tmp_path / "released")
    subprocess.run(["git", "tag", f"v{VERSION}"], cwd=released, check=True, capture_output=True)
    project = bake_from(f"git+file://localhost{released}", tmp_path, f"v{VERSION}", published=True)
    assert pin_of(project.path) == f"dist-template=={VERSION}"


def test_dockerfile_copies_what_there_is(default: BakedProject) -> None:
    text = default.read("Dockerfile")
    sources = [
        word
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    sources = [word for word in sources if not word.startswith("--")]
    assert {"environment.py", "lock-*.txt", "Makefile", "my_trainer", "configs"} <= set(sources)
    for source in sources:  # [x] at the end: may be missing, and COPY takes the others of its line
        assert glob.glob(source, root_dir=default.path) or source in (
            "wheel[s]",
            "vendor/dist-templat[e]",
        ), source
    assert re.findall(r"make (\w+)", text) == ["setup"]
