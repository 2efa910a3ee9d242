"""launch --on ray: a local Ray of two workers trains as one machine, also when one is killed."""

import contextlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from dist_template.errors import Exit
from tests.support.launched import Launched, one_machine, site
from tests.support.runs import PACKAGE, logged

LACKS = pytest.mark.skipif(not find_spec("ray"), reason="needs ray, which `all` does not have")
pytestmark = [pytest.mark.slow, pytest.mark.nightly, LACKS]
VICTIMS: dict[str, Callable[[psutil.Process], bool]] = {
    "a rank": lambda process: process.environ().get("RANK") == "1" and PACKAGE in process.cmdline(),
    "a worker of Ray": lambda process: process.name().startswith("ray::RayTrain"),
}


def kill(started: int, is_victim: Callable[[psutil.Process], bool]) -> None:
    for process in psutil.Process(started).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if is_victim(process):
                process.kill()
                return
    raise AssertionError("there is no such process")


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_changes_no_loss(victim: str, flags: Any, tmp_path: Path, monkeypatch: Any) -> None:
    more = "--trainer.max_steps=300 --last_checkpoint.every_n_steps=50"
    flags = [*flags, *more.split(), "--trainer.val_check_interval=300"]
    losses = one_machine(flags, tmp_path)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    sizes = ["--trainer.devices=2", site(tmp_path, nodes=1)]
    launched = Launched(tmp_path, "ray", *flags, *sizes)
    try:
        launched.reach(60)
        kill(launched.process.pid, VICTIMS[victim])
        assert launched.end() == Exit.DONE, launched.out.read_text()[-5000:]
    finally:
        launched.process.terminate()
    found = logged(launched.run, "train/loss")
    assert len(found) == 300 and found == pytest.approx(losses, abs=1e-6)
