"""The template's own files: valid before they are rendered, current, and kept to the rules of the
house."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from .conftest import PACKAGE, ROOT, SOURCE, BakedProject

SKIPPED = {
    ".git", ".venv", ".tools", "build", "site", "__pycache__", ".pytest_cache", ".ruff_cache",
    ".hypothesis", "dist_template.egg-info",
}  # fmt: skip
LIBRARY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KERNELS = {"flash", "ray"}  # extras for GPUs, and Ray, which the locks do not have
IMAGES = {".png", ".gif", ".svg"}


def texts(folder: Path) -> list[Path]:
    found = (
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in IMAGES
    )
    return [path for path in found if not SKIPPED & set(path.relative_to(ROOT).parts)]


TEXTS = texts(ROOT)
PYTHON = [path for path in TEXTS if path.suffix == ".py"]
COPIED = [
    path for name in (PACKAGE.name, "configs", "launch", "tests") for path in texts(SOURCE / name)
]


def ids(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


@pytest.mark.parametrize("path", COPIED, ids=ids(COPIED))
def test_copied_file_holds_no_jinja(path: Path) -> None:
    assert "cookiecutter" not in path.read_text(encoding="utf-8")


def test_unrendered_yaml_and_toml_parse() -> None:
    for path in TEXTS:
        if path.suffix in {".yaml", ".yml"}:
            yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.suffix == ".toml":
            tomllib.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PYTHON, ids=ids(PYTHON))
def test_python_file_is_short_enough_to_read(path: Path) -> None:
    most = 700 if path.name in ("faults.py", "fault_runs.py") else 400  # lists of planted faults
    assert len(path.read_text(encoding="utf-8").splitlines()) <= most
    assert not re.match("(utils|common|helpers|misc)$|base_", path.stem)


def test_package_imports_itself_relatively() -> None:
    absolute = re.compile(r"^\s*(from|import) (my_trainer|trainer_dev)\b", flags=re.MULTILINE)
    for path in PACKAGE.rglob("*.py"):
        assert not absolute.search(path.read_text(encoding="utf-8")), path


def test_blocked_versions_are_excluded_wherever_their_package_is_required() -> None:
    """The project's pyproject.toml has the list; a library's metadata has to repeat it."""
    chosen = tomllib.loads((SOURCE / "pyproject.toml").read_text())["tool"]["environment"]
    blocked = {Requirement(rule).name: Requirement(rule).specifier for rule in chosen["blocked"]}
    assert {"lightning", "pytorch-lightning"} <= set(blocked)
    assert all("GHSA-" in advisory for advisory in chosen["blocked"].values())
    found, pattern = 0, re.compile(r"(?<![\w-])([\w-]+)([=<>~!]=?\d[^\"\s;]*)")
    for path in (path for path in TEXTS if path.suffix in {".toml", ".txt"}):
        for name, text in pattern.findall(path.read_text(encoding="utf-8")):
            versions = [rule.version for rule in blocked.get(name, ())]
            allowed = list(Requirement(name + text).specifier.filter(versions))
            assert not allowed, f"{path}: {name}{text}"
            found += bool(versions)
    assert found >= 5  # the library's pyproject.toml and both locks: lightning, pytorch-lightning


def test_every_requirement_is_pinned_once_and_without_an_address() -> None:
    text = (SOURCE / "lock-cuda.txt").read_text()
    names = re.findall(r"^([a-z0-9-]+)==[\w.]+ ", text, flags=re.MULTILINE)
    assert len(set(names)) == len(names) > 100 and "://" not in text
    extras = LIBRARY["optional-dependencies"]
    required = [each for name in extras.keys() - KERNELS for each in extras[name]]
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())
    asked = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    for requirement in [*LIBRARY["dependencies"], *required, *asked]:
        name = re.match(r"[\w.-]+", requirement)
        assert name, requirement
        normalized = re.sub(r"[-_.]+", "-", name.group()).lower()
        assert normalized in {*names, "dist-template"}, f"{requirement} has no pin"


def test_no_file_names_a_package_registry() -> None:
    names = r"pypi|pythonhosted|download\.pytorch|/simple\b"
    address = re.compile(rf"https?://[^\s)\"']*({names})", re.IGNORECASE)
    for path in TEXTS:
        assert not address.search(path.read_text(encoding="utf-8")), path


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


def assert_tree_is_current(root: Path, paths: set[str], must_list: set[str]) -> None:
    gone = {path for path in paths if not (root / path).exists()}
    assert not gone, f"the README's tree lists what is not there: {sorted(gone)}"
    missing = must_list - {path.rstrip("/") for path in paths}
    assert not missing, f"the README's tree lacks {sorted(missing)}"


def test_tree_in_the_projects_readme_is_current(default: BakedProject) -> None:
    inner = default.path / default.package
    listed = {path for path in inner.glob("*.py") if path.name != "__init__.py"}
    listed |= {path for path in default.path.iterdir() if not path.name.startswith(".")}
    listed |= {path for path in (default.path / "configs").iterdir()}
    must_list = {path.relative_to(default.path).as_posix() for path in listed}
    assert_tree_is_current(default.path, tree_in(default.read("README.md")), must_list)


def test_every_page_that_is_named_exists(default: BakedProject) -> None:
    """In comments and strings of project and library, and in links of the project's README."""
    files = [path for name, path in default.files.items() if name != "README.md"]
    named = list[str]()
    for path in [*files, *(ROOT / "src").rglob("*.py")]:
        named += re.findall(r"(?<![\w/])docs/[\w/.-]*\w", path.read_text(encoding="utf-8"))
    assert len(named) > 3 and not [each for each in named if not (ROOT / each).exists()]
    links = re.findall(r"\]\(([^)#\s]+)", default.read("README.md"))
    assert len(links) > 4 and all(link.startswith(f"{ROOT.as_uri()}/docs/") for link in links)
    assert not [link for link in links if not Path(link.removeprefix("file://")).exists()]


def test_tree_in_the_templates_readme_is_current() -> None:
    top = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - SKIPPED
    assert_tree_is_current(ROOT, tree_in((ROOT / "README.md").read_text()), top)


def test_demo_of_the_makefile_uses_the_default_slug(default: BakedProject) -> None:
    assert f"DEMO := $(OUT)/{default.path.name}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("folder", ["configs", "launch", PACKAGE.name, "src"])
def test_every_file_that_a_comment_names_exists(folder: str) -> None:
    """Of the project's configurations and code, and in the sentences of the library."""
    launch = "launch" if folder != "src" else "-"  # a folder of the library, too
    for path in texts(ROOT / folder if folder == "src" else SOURCE / folder):
        for name in re.findall(rf"\b(?:configs|{launch})/[\w./-]*\w", path.read_text("utf-8")):
            if folder == "src" and not name.endswith(".yaml"):
                continue  # the beginning of a name
            places = [SOURCE / name, ROOT / "src" / "dist_template" / name]
            assert any(place.exists() for place in places), f"{path.relative_to(ROOT)} names {name}"
