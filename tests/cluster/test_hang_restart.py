"""A rank that hangs under the real launcher: the hang is detected and reported, and training restarts by itself."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from dist_template.errors import Exit
from tests.support.injury import Training, kill
from tests.support.runs import run

LIMIT_S = 4.0
AGAIN_S = 10.0  # the promise, on an idle machine: 7 were measured, most of them imports
SLACK_S = 30.0  # of a busy one; without the watchdog the ranks wait for a collective's limit, a minute later


@pytest.mark.slow
def test_a_rank_that_stands_still_is_replaced_within_ten_seconds_of_the_limit(
    flags: list[str], tmp_path: Path
) -> None:
    """It is rank 0, whose process holds the store that the ranks talk through; stopped as by a debugger."""
    run("prepare", *flags)
    limits = [
        f"--watchdog.timeout_s={LIMIT_S:g}",
        "--trainer.max_steps=100000",
        "--trainer.val_check_interval=100000",
    ]
    argv = ["fit", *flags, "--trainer.strategy=ddp", *limits, "--last_checkpoint.every_n_steps=20"]
    with Training(tmp_path / "hung", argv, NPROC="2") as training:
        begun = training.reach(10)
        stopped_at = time.time()
        kill(training.ranks()[0], signal.SIGSTOP)
        training.wait(lambda: training.steps()[-1].life != begun.life)
        took_s = next(step for step in training.steps() if step.life != begun.life).at - stopped_at
        print(
            f"first batch {took_s:.1f} s after the stop, {took_s - LIMIT_S:.1f} s after the limit"
        )
        assert LIMIT_S - 0.5 < took_s < LIMIT_S + AGAIN_S + SLACK_S
        kill(training.launcher.pid, signal.SIGTERM)
        assert training.end(20) == Exit.REQUEUE
        printed = re.findall(
            r"^no progress for 4 s: (.*?):", training.log.read_text(), re.MULTILINE
        )
        assert printed == ["rank 0 is unresponsive"]
