"""The package stands alone, and its wheel has all of it."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fake_cuda

DISTRIBUTION = Path(__file__).parents[1]
PACKAGE = Path(fake_cuda.__file__).parent


def project_of(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


def imported(path: Path) -> set[str]:
    """Returns the packages that a file imports; "" for its own."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("" if node.level else str(node.module).partition(".")[0])
    return found


def test_it_imports_torch_alone() -> None:
    for path in PACKAGE.glob("*.py"):
        assert imported(path) - {"", "torch"} <= sys.stdlib_module_names, path


def test_it_requires_the_torch_that_it_was_verified_with() -> None:
    assert project_of(DISTRIBUTION)["dependencies"] == [f"torch=={fake_cuda.VERIFIED[0]}"]


@pytest.mark.slow
def test_a_wheel_has_every_source(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    source = tmp_path / "source"  # a build leaves files beside what it builds
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(DISTRIBUTION, source, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"fake_cuda-{project_of(DISTRIBUTION)['version']}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [path for path in PACKAGE.rglob("*") if "__pycache__" not in path.parts]
    assert names == {path.relative_to(PACKAGE.parent).as_posix() for path in sources}
