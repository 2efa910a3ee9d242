"""Entry points of installed packages, and of the pyproject.toml of a project that is not."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from dist_template import InputError, Project, plugins
from dist_template.cli import main as command_line
from tests.support.installed import write_metadata

GROUP = "dist_template.examples"  # this library registers none


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pyproject.toml of a started project with two entry points."""
    monkeypatch.setattr("dist_template.project._program", "dist_template")
    (tmp_path / "a_trainer").mkdir()
    file = tmp_path / "pyproject.toml"
    points = f'[project.entry-points."{GROUP}"]\nb = "a_trainer.b:B"\na = "x"\n'
    file.write_text(f'[project]\nname = "A.Trainer"\n{points}')
    monkeypatch.syspath_prepend(tmp_path)
    Project("a_trainer").start()
    return file


def test_entry_points_of_packages_and_project_are_sorted(project: Path) -> None:
    write_metadata(project.parent, "other", {GROUP: {"ab": "other:AB"}})
    found = plugins.registered(GROUP)
    assert list(found) == ["a", "ab", "b"] and found["b"] == EntryPoint("b", "a_trainer.b:B", GROUP)


def test_one_name_of_two_packages_is_refused_with_both(project: Path) -> None:
    write_metadata(project.parent, "other", {GROUP: {"b": "other:B"}})
    with pytest.raises(InputError, match="a-trainer and other both have 'b' in the group"):
        plugins.registered(GROUP)
    with pytest.raises(InputError, match="dist_template and a-trainer both have 'a' in the group"):
        plugins.registered(GROUP, taken={"a"})


BROKEN = {
    "def main(:": "(cannot be read: invalid syntax (<unknown>, line 1))",
    '"""`broken`: does nothing."""': "does nothing",
    None: "(not found: a_trainer.broken)",
}


@pytest.mark.parametrize("text", BROKEN)
def test_help_shows_a_broken_or_missing_verb(text: str | None, project: Path, capsys: Any) -> None:
    if text is not None:
        (project.parent / "a_trainer" / "broken.py").write_text(text)
    project.write_text('[project.entry-points."dist_template.verbs"]\nbroken = "a_trainer.broken"')
    assert command_line.run(["--help"], Project("a_trainer")) == 0
    assert f"\n  broken             {BROKEN[text]}\n" in capsys.readouterr().out


def test_a_pyproject_that_is_not_toml_is_refused_with_its_path(project: Path) -> None:
    project.write_text("[project\n")
    with pytest.raises(InputError, match=rf"^{project}: .*line 1"):
        plugins.registered(GROUP)
