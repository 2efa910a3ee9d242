"""The template's own files are valid before they are rendered, name what is there, keep rules."""

import json
import os
import re
import runpy
import sys
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.support import house

from .conftest import PACKAGE, ROOT, SOURCE, BakedProject, output

SKIPPED = {".git", ".venv", ".tools", "build", "site", "dist_template.egg-info"}
SKIPPED |= {"__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"}
IMAGES = {".png", ".gif", ".svg"}


@cache
def texts(folder: Path) -> dict[Path, str]:
    found: dict[Path, str] = {}
    for top in folder.iterdir():
        if top.name in SKIPPED:  # before they are walked through
            continue
        for path in (top, *top.rglob("*")):
            is_skipped = not SKIPPED.isdisjoint(path.relative_to(ROOT).parts)
            if not is_skipped and path.is_file() and path.suffix not in IMAGES:
                found[path] = path.read_text("utf-8")
    return found


def test_copied_files_hold_no_jinja_and_the_package_imports_itself_relatively() -> None:
    absolute = re.compile(r"^\s*(from|import) (my_trainer|trainer_dev)\b", flags=re.MULTILINE)
    for name in (PACKAGE.name, "configs", "launch", "tests"):
        for path, text in texts(SOURCE / name).items():
            assert "cookiecutter" not in text, path
            assert name != PACKAGE.name or not absolute.search(text), path


def test_yaml_and_toml_parse_and_no_python_file_is_called_utils() -> None:
    for path, text in texts(ROOT).items():
        if path.suffix in {".yaml", ".yml"}:
            yaml.safe_load(text)
        if path.suffix == ".toml":
            tomllib.loads(text)
        if path.suffix == ".py":
            assert not re.match("(utils|common|helpers|misc)$|base_", path.stem), path


def test_blocked_versions_are_excluded_wherever_their_package_is_required() -> None:
    """The project's pyproject.toml has the list; a library's metadata has to repeat it."""
    chosen = tomllib.loads((SOURCE / "pyproject.toml").read_text())["tool"]["environment"]
    blocked: dict[str, list[str]] = {}  # versions, by package
    for rule, advisory in chosen["blocked"].items():
        assert "GHSA-" in advisory
        requirement = Requirement(rule)
        blocked[requirement.name] = [version.version for version in requirement.specifier]
    assert {"lightning", "pytorch-lightning"} <= blocked.keys()
    lists = [text for path, text in texts(ROOT).items() if path.suffix in {".toml", ".txt"}]
    requirements = re.findall(r"(?<![\w-])([\w-]+)([=<>~!]=?\d[^\"\s;]*)", "\n".join(lists))
    num_checked = 0
    for name, versions in requirements:
        if name in blocked:
            allowed = Requirement(name + versions).specifier.filter(blocked[name])
            assert not list(allowed), f"{name}{versions}"
            num_checked += 1
    assert num_checked >= 5  # the library's pyproject.toml and both locks have both


def test_no_file_names_a_package_registry() -> None:
    names = r"pypi|pythonhosted|download\.pytorch|/simple\b"
    address = re.compile(rf"https?://[^\s)\"']*({names})", re.IGNORECASE)
    assert not [path for path, text in texts(ROOT).items() if address.search(text)]


def tree_in(readme: str) -> set[str]:
    """Paths in the README's first block marked `text`; two spaces deeper is a folder deeper."""
    block = re.search(r"```text\n(.*?)```", readme, flags=re.DOTALL)
    assert block, "the README prints no tree"
    parents: list[str] = []
    paths: set[str] = set()
    for line in block.group(1).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in re.split(r"\s{2,}", line.strip())[0].split():
            paths.add("".join(parents[:depth]) + name)
            parents[depth:] = [name]
    return paths


def test_trees_in_the_readmes_are_current(default: BakedProject) -> None:
    project = default.path
    of_project = {*project.glob("[!.]*"), *(project / "configs").iterdir()}
    of_project |= {*(project / default.package).glob("*.py")}
    of_project -= {project / default.package / "__init__.py"}
    of_root = {path for path in ROOT.glob("[!.]*") if path.name not in SKIPPED}
    for root, must_list in ((project, of_project), (ROOT, of_root)):
        paths = tree_in((root / "README.md").read_text())
        assert not [path for path in paths if not (root / path).exists()], "it lists what is gone"
        listed = {root / path for path in paths}
        assert must_list <= listed, must_list - listed


def test_every_page_and_configuration_that_is_named_exists(default: BakedProject) -> None:
    """In comments and strings of project and library, and in links of the project's README."""
    library = ROOT / "src" / "dist_template"
    files = [path for name, path in default.files.items() if name != "README.md"]
    files += library.rglob("*.py")
    pattern = re.compile(r"(?<![\w/])(?:docs/[\w/.-]*\w|configs/[\w./-]*\.yaml)")
    named = [name for path in files for name in pattern.findall(path.read_text("utf-8"))]
    assert len(named) > 10
    for name in named:
        assert any((place / name).exists() for place in (ROOT, default.path, library)), name
    links = re.findall(r"\]\(([^)#\s]+)", default.read("README.md"))
    assert len(links) > 4 and all(link.startswith(f"{ROOT.as_uri()}/docs/") for link in links)
    assert not [link for link in links if not Path(link.removeprefix("file://")).exists()]


OWNERS = ROOT / ".github" / "CODEOWNERS"


def test_every_room_has_its_owners_and_every_pattern_a_file(repository: Path) -> None:
    rules = [line.split() for line in OWNERS.read_text().splitlines() if line[:1] not in ("", "#")]

    def fits(file: str, pattern: str) -> bool:
        if pattern.endswith("/"):  # all files of a folder
            pattern += "*"
        return fnmatch(f"/{file}", pattern)

    files = [str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()]
    for pattern, _ in rules:
        assert any(fits(file, pattern) for file in files), pattern
    for name, path in house.modules(ROOT / "src" / "dist_template").items():
        room = house.room_of(name, path) if name else "ground"
        own = path.relative_to(ROOT).as_posix()
        owned = [own]
        if own.count("/") > 2:  # a room that is a folder has tests in one of its name
            owned.append(f"tests/{room}/test_one.py")
        for file in owned:
            teams = [team for pattern, team in rules if fits(file, pattern)]
            assert teams[-1] == f"@org/{room}", file  # the last rule decides


def test_the_drawn_house_is_the_codes() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "architecture.py"))
    is_current = drawing["FIGURE"].read_text() == drawing["figure"]()
    assert is_current, "run .venv/bin/python docs/architecture.py"


@pytest.mark.nightly
def test_the_notebooks_commands_run(tmp_path: Path) -> None:
    """From this template, in this environment."""
    cells = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    lines = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    here = f"{ROOT} --default-config --overwrite-if-exists"
    folder = tmp_path / "my-trainer"
    folder.mkdir()
    (folder / ".venv").symlink_to(sys.prefix)
    settings = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    settings["MAKEFLAGS"] = "--old-file=.venv/.ready"
    for line in lines.replace("gh:org/dist-template", here).splitlines():
        if line.startswith("!") and "virtualenv" not in line and "make setup" not in line:
            where = tmp_path if "cookiecutter" in line else folder
            output("bash", "-c", line[1:], cwd=where, **settings)
    assert "loss" in (folder / "report.html").read_text(encoding="utf-8")
