"""launch --on ray: a local Ray of two workers trains as one machine, also when one is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from dist_template.errors import Exit
from tests.support.injury import OF_A_LAUNCHER
from tests.support.launched import site
from tests.support.runs import PACKAGE, PROJECT, Workers, logged, run

LACKS = pytest.mark.skipif(not find_spec("ray"), reason="needs ray, which `all` does not have")
pytestmark = [pytest.mark.slow, pytest.mark.nightly, LACKS]
VICTIMS: dict[str, Callable[[psutil.Process], bool]] = {
    "a rank": lambda process: process.environ().get("RANK") == "1" and PACKAGE in process.cmdline(),
    "a worker of Ray": lambda process: process.name().startswith("ray::RayTrain"),
}


def launch(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_LAUNCHER)}
    kept |= {"DIST_RUN_ID": "ray", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", PACKAGE, "launch", "--on=ray", *flags, site(folder, nodes=1)]
    with (folder / "out").open("wb") as out:
        return subprocess.Popen(command, cwd=PROJECT, env=kept, stdout=out, stderr=out)


def kill(started: subprocess.Popen[bytes], is_victim: Callable[[psutil.Process], bool]) -> None:
    for process in psutil.Process(started.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if is_victim(process):
                process.send_signal(signal.SIGKILL)
                return
    raise AssertionError("there is no such process")


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_worker_changes_no_loss(victim: str, flags: Any, tmp_path: Path) -> None:
    more = "--trainer.devices=2 --trainer.max_steps=300 --last_checkpoint.every_n_steps=50"
    flags = [*flags, *more.split(), "--trainer.val_check_interval=300"]
    run("prepare", *flags)
    with Workers(2) as workers:
        one = workers.run(["fit", *flags, "--run.name=one"], tmp_path / "one").check()
    folder, started = tmp_path / "runs" / "default" / "ray", launch(tmp_path, *flags)
    try:
        deadline = time.monotonic() + 300
        file, out = folder / "metrics.jsonl", tmp_path / "out"
        while not file.exists() or max(logged(folder, "train/loss"), default=0) < 60:
            assert started.poll() is None and time.monotonic() < deadline, out.read_text()[-3000:]
            time.sleep(0.2)
        kill(started, VICTIMS[victim])
        assert started.wait(400) == Exit.DONE, out.read_text()[-5000:]
    finally:
        started.terminate()
    losses = logged(folder, "train/loss")
    assert len(losses) == 300 and losses == pytest.approx(one.loss, abs=1e-6)
