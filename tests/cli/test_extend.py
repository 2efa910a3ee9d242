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
