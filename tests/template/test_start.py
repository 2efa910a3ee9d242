"""Files for GitHub and editors name what is there: owners, the drawn house, the notebook."""

import json
import os
import runpy
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support import house

from .conftest import ROOT, output

OWNERS = ROOT / ".github" / "CODEOWNERS"


def test_every_room_has_its_owners_and_every_pattern_a_file(repository: Path) -> None:
    rules = [line.split() for line in OWNERS.read_text().splitlines() if line[:1] not in ("", "#")]

    def fits(file: str, pattern: str) -> bool:
        return fnmatch(f"/{file}", pattern + "*" * pattern.endswith("/"))

    files = [str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()]
    assert not [pattern for pattern, _ in rules if not any(fits(file, pattern) for file in files)]
    for name, path in house.modules(ROOT / "src" / "dist_template").items():
        room = house.room_of(name, path) if name else "ground"
        owned = [path.relative_to(ROOT).as_posix()]
        owned += [f"tests/{room}/test_one.py"] * (owned[0].count("/") > 2)
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
