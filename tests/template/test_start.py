"""How one starts beside cookiecutter, and how one contributes: files for GitHub and editors name
what is there."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from dist_template.cli.verbs import verbs
from tests.support import house

from .conftest import ROOT

OWNERS = ROOT / ".github" / "CODEOWNERS"
CELLS = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code")


def fits(path: str, pattern: str) -> bool:
    words = re.escape(pattern).replace(r"\*", ".*" if pattern == "*" else "[^/]*")
    words += ".*" * pattern.endswith("/")
    return bool(re.fullmatch(words, path if pattern == "*" else f"/{path}"))


def test_every_room_has_its_owners_and_every_pattern_a_file(repository: Path) -> None:
    rules = [line.split() for line in OWNERS.read_text().splitlines() if line[:1] not in ("", "#")]
    files = [str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()]
    assert not [pattern for pattern, _ in rules if not any(fits(file, pattern) for file in files)]
    for name, path in house.modules(ROOT / "src" / "dist_template").items():
        room = house.room_of(name, path) if name else "ground"
        owned = [path.relative_to(ROOT).as_posix()]
        owned += [f"tests/{room}/test_one.py"] * (owned[0].count("/") > 2)
        for file in owned:
            teams = [team for pattern, team in rules if fits(file, pattern)]
            assert teams[-1] == f"@org/{room}", file  # the last rule decides


def test_a_report_of_a_bug_has_doctors_output() -> None:
    paths = OWNERS.parent.glob("ISSUE_TEMPLATE/*.yml")
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in paths}
    assert set(forms) == {"bug", "feature", "config"}
    assert all(forms[one]["body"] for one in ("bug", "feature"))
    request = (OWNERS.parent / "PULL_REQUEST_TEMPLATE.md").read_text()
    assert "doctor`" in str(forms["bug"]) and "doctor`" in request


def test_the_drawn_house_is_the_codes() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "architecture.py"))
    is_current = drawing["FIGURE"].read_text() == drawing["figure"]()
    assert is_current, "run .venv/bin/python docs/architecture.py"


def test_the_notebook_uses_the_projects_commands() -> None:
    cells = [cell for cell in CELLS if "outputs" in cell]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert re.findall(r"^!make (\w+)", CODE, re.MULTILINE) == ["setup", "train", "train"]
    used = set(re.findall(r"-m my_trainer (\w+)", CODE))
    assert used == {"doctor", "diagnose", "report"} < set(verbs())


@pytest.mark.nightly
def test_the_notebooks_commands_run(tmp_path: Path) -> None:
    """From this template, in this environment."""
    folder, path = tmp_path / "my-trainer", f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    folder.mkdir()
    (folder / ".venv").symlink_to(sys.prefix)
    here = f"{ROOT} --default-config --overwrite-if-exists"
    settings = os.environ | {"PATH": path, "MAKEFLAGS": "--old-file=.venv/.ready"}
    for line in CODE.replace("gh:org/dist-template", here).splitlines():
        if line.startswith("!") and "virtualenv" not in line and "make setup" not in line:
            where = tmp_path if "cookiecutter" in line else folder
            settings["PWD"] = str(where)
            subprocess.run(["bash", "-c", line[1:]], cwd=where, env=settings, check=True)
    assert "loss" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_archive_of_a_release_pins_its_tag(repository: Path, tmp_path: Path) -> None:
    address, archive = f"git+file://localhost{repository}", tmp_path / "my-trainer.tar.gz"
    settings = os.environ | {"HOME": str(tmp_path), "PWD": str(ROOT)}
    for source in (str(repository), address):
        command = ["make", "starter", "READY=", f"OUT={tmp_path}", f"FROM={source}", "TAG=v1"]
        done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
        is_made = source == address
        assert (done.returncode == 0) == archive.exists() == is_made, done.stdout + done.stderr
        assert ("is a folder, which other machines do not have" in done.stdout) != is_made
    assert {"my-trainer/Makefile", "my-trainer/lock-cpu.txt"} <= {*tarfile.open(archive).getnames()}
    chosen = tmp_path / "starter" / "my-trainer" / "pyproject.toml"
    assert f'\nlibrary = "dist-template @ {address}@v1"' in chosen.read_text()
