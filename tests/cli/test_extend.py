"""The package of docs/extend.md, installed: its verb, its rule and its hooks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.installed import write_metadata
from tests.support.line import command
from tests.support.runs import PACKAGE, PROJECT, only_run, run, run_in_subprocess
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
    """What `python -m <package> …` prints where the package is installed."""
    env = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{os.environ['PYTHONPATH']}"}
    argv = (sys.executable, "-m", PACKAGE, *argv)
    return subprocess.check_output(argv, env=env, cwd=PROJECT, text=True)


def test_a_package_adds_a_verb_a_rule_and_hooks(
    site: Path, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    assert re.search(
        "\n  runs +lists runs with their last validation loss\n", started(site, "--help")
    )
    assert run("fit", *flags, "--trainer.max_steps=3") == 0
    folder = only_run(tmp_path)
    assert (folder / "ended.txt").read_text() == "None"
    assert re.fullmatch(rf"{folder} \d\.\d{{4}}\n", started(site, "runs", str(tmp_path / "runs")))
    assert run("diagnose", str(folder)) == 0
    shown = capfd.readouterr().out
    assert "the run is short (certain)" in shown and "--trainer.max_steps 1000" in shown

    breaks = ["--run.name=second", "--trainer.callbacks+=tests.support.runs.StopAfter"]
    breaks += ["--trainer.callbacks.step=2"]
    assert command(["fit", *flags, *breaks]) == 1
    assert "\nsee the runbook of RuntimeError\n" in capfd.readouterr().err
    ended = (only_run(tmp_path, "second") / "ended.txt").read_text()
    assert ended.startswith("RuntimeError('stopped by the test")


def test_a_hook_or_a_rule_that_raises_changes_nothing(
    site: Path, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    hook = "def at_run_end(run, error):\n    raise SystemExit(7)\n"
    (site / "my_tools" / "hooks.py").write_text(hook)
    (site / "my_tools" / "rules.py").write_text("import a_module_that_is_missing\n")
    for name in ("my_tools.hooks", "my_tools.rules"):
        sys.modules.pop(name, None)
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


@pytest.mark.slow
def test_a_strategy_of_another_package_is_known_by_its_name_and_refuses_by_itself(
    flags: list[str], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "my_sharding.py").write_text(STRATEGY)
    names = {"strategies": "my_sharding:Careful", "shardings": "my_sharding:Answers"}
    points = {f"dist_template.{group}": {"Careful": at} for group, at in names.items()}
    write_metadata(site, "my-sharding", points)
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    short = ["--trainer.max_steps=2", "--model.optim.warmup=0", "--trainer.devices=2"]
    careful = ["--trainer.strategy.class_path=Careful", "--trainer.strategy.most"]
    refused = run_in_subprocess("fit", *flags, *short, *careful, "1", PYTHONPATH=path)
    assert refused.returncode == 2
    assert "error: Careful takes 1 processes: edit trainer.devices\n" in refused.stderr
    done = run_in_subprocess("fit", *flags, *short, *careful, "2", PYTHONPATH=path)
    assert done.returncode == 0 and "finished after step 2" in done.stdout, (
        done.stdout + done.stderr
    )
