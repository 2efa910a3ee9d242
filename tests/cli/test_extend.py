"""The package of docs/extend.md, installed; entry points of packages and of a project."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from dist_template import InputError, Project, plugins
from dist_template.cli import main as command_line
from tests.support.extras import write_metadata
from tests.support.line import command
from tests.support.runs import PACKAGE, PROJECT, only_run, run
from tests.support.wings import engine

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
FILE = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files outside of the repository, with metadata as pip writes it."""
    folder = tmp_path / "site"
    for name, text in FILE.findall(PAGE.read_text(encoding="utf-8")):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    write_metadata(folder, project["name"], project["entry-points"])
    monkeypatch.syspath_prepend(folder)
    engine.registered_rules.cache_clear()
    yield folder
    engine.registered_rules.cache_clear()


def started(site: Path, *argv: str) -> str:
    """What Python prints where the package is installed."""
    env = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{os.environ['PYTHONPATH']}"}
    return subprocess.check_output([sys.executable, *argv], env=env, cwd=PROJECT, text=True)


@pytest.mark.slow
def test_a_package_adds_verb_rule_hooks(site: Path, flags: Any, tmp_path: Path, capfd: Any) -> None:
    help_line = "\n  runs +lists runs with their last validation loss\n"
    assert re.search(help_line, started(site, "-m", PACKAGE, "--help"))
    assert run("fit", *flags, "--trainer.max_steps=3") == 0
    folder = only_run(tmp_path)
    assert (folder / "ended.txt").read_text() == "None"
    listed = started(site, "-m", PACKAGE, "runs", str(tmp_path / "runs"))
    assert re.fullmatch(rf"{folder} \d\.\d{{4}}\n", listed)
    assert run("diagnose", str(folder)) == 0
    shown = capfd.readouterr().out
    assert "the run is short (certain)" in shown and "--trainer.max_steps 1000" in shown

    breaks = ["--run.name=second", "--trainer.callbacks+=tests.support.runs.StopAfter"]
    assert command(["fit", *flags, *breaks, "--trainer.callbacks.step=2"]) == 1
    assert "\nsee the runbook of RuntimeError\n" in capfd.readouterr().err
    ended = (only_run(tmp_path, "second") / "ended.txt").read_text()
    assert ended.startswith("RuntimeError('stopped by the test")


def test_what_raises_changes_nothing(site: Path, flags: Any, tmp_path: Path, capfd: Any) -> None:
    files = {"hooks": "def at_run_end(run, error):\n    raise SystemExit(7)\n"}
    files["rules"] = "import a_module_that_is_missing\n"
    for name, text in files.items():
        (site / "my_tools" / f"{name}.py").write_text(text)
        sys.modules.pop(f"my_tools.{name}", None)
    assert run("fit", *flags, "--trainer.max_steps=2") == 0
    assert "at_run_end of my_tools failed: SystemExit: 7" in capfd.readouterr().err
    assert run("diagnose", str(only_run(tmp_path))) == 0
    assert "the rule short_run failed" in capfd.readouterr().out


STRATEGY = """
from collections.abc import Iterator
from dataclasses import dataclass

from lightning.pytorch.strategies import DDPStrategy

from dist_template.parallel.answers.plain import Plain
from dist_template.parallel.run_strategy import RunDefaults


class Careful(RunDefaults, DDPStrategy):
    def __init__(self, most: int = 2) -> None:
        super().__init__(process_group_backend="gloo")
        self.arguments = {"most": most}


@dataclass(frozen=True)
class Answers(Plain):
    name: str = "Careful"

    @classmethod
    def of(cls, arguments) -> "Answers":
        return cls(arguments)

    def refusals(self, setup) -> Iterator[str]:
        if setup.machine.world_size > self.arguments.get("most", 2):
            yield f"Careful takes {self.arguments['most']} processes: edit trainer.devices"
"""
TWICE = """
import sys
from tests.support.runs import run

assert run(*sys.argv[1:], "--trainer.strategy.most=0") == 2
assert run(*sys.argv[1:], "--trainer.strategy.most=1") == 0
"""


@pytest.mark.slow
def test_a_packages_strategy_has_a_name_and_refuses(flags: Any, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "my_sharding.py").write_text(STRATEGY)
    names = {"strategies": "my_sharding:Careful", "shardings": "my_sharding:Answers"}
    points = {f"dist_template.{group}": {"Careful": at} for group, at in names.items()}
    write_metadata(tmp_path, "my-sharding", points)
    careful = ["--trainer.max_steps=2", "--trainer.strategy.class_path=Careful"]
    printed = started(tmp_path, "-c", TWICE, "fit", *flags, *careful)
    assert "finished after step 2" in printed
    assert "error: Careful takes 0 processes: edit trainer.devices\n" in capfd.readouterr().err


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
