"""Each launcher trains to the same losses and exit codes: the table of docs/launch.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from tests.support.launched import LAUNCHERS, STEPS, Launched, codes, row, two
from tests.support.loopback import Hosts
from tests.support.runs import logged, only_run, run, run_in_subprocess

DOCS = ROOT / "docs" / "launch.md"
pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize("on", LAUNCHERS)
def test_launchers_have_the_same_losses_and_codes(
    on: str, hosts: Hosts, flags: list[str], tmp_path: Path
) -> None:
    assert run("prepare", *flags) == 0
    root = f"--run.root={tmp_path / 'plain' / 'runs'}"
    done = run_in_subprocess("fit", *flags, root, *STEPS, "--trainer.devices=2")
    assert done.returncode == 0, done.stderr
    losses, started = logged(only_run(tmp_path / "plain"), "train/loss"), list[Launched]()

    def start(name: str, flags: list[str], environment: dict[str, str]) -> Launched:
        where = two(hosts, tmp_path, environment=environment)
        started.append(Launched(tmp_path, on, *flags, where, name=name))
        return started[-1]

    found = codes(start, flags, Launched.end)
    own = logged(started[0].run, "train/loss")
    assert own.keys() == losses.keys()
    print(line := row(on, max(abs(own[step] - losses[step]) for step in losses), found))
    assert line in DOCS.read_text(encoding="utf-8"), line
