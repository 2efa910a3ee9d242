"""Goodput: every second of a run is of one kind, through kills and restarts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from dist_template.callbacks import goodput
from dist_template.observe.history.goodput import describe, read, share
from dist_template.observe.history.run import RunFile
from pytest import CaptureFixture, MonkeyPatch
from trainer_dev.data import DataModule

from tests.support.runs import only_run, run


def lines(folder: Path, *attempts: dict[str, float]) -> Path:
    (folder / RunFile.GOODPUT).write_text(
        "".join(json.dumps(line) + "\n" for line in attempts), encoding="utf-8"
    )
    return folder


def test_repeated_steps_are_lost_time_and_the_gap_is_restart(tmp_path: Path) -> None:
    killed = {
        "attempt": 100.0,
        "time": 130.0,
        "from_step": 0,
        "step": 20,
        "start": 6,
        "productive": 20,
        "data_wait": 4,
    }
    early = killed | {"time": 110.0, "step": 3, "productive": 2, "data_wait": 2}
    second = {
        "attempt": 137.0,
        "time": 160.0,
        "from_step": 15,
        "step": 25,
        "start": 5,
        "productive": 10,
    }
    second |= {"checkpoint": 3, "validation": 5}
    again = {
        "attempt": 161.0,
        "time": 170.0,
        "from_step": 10,
        "step": 12,
        "start": 5,
        "productive": 4,
    }
    total = read(lines(tmp_path, early, killed, second))
    # 5 of 20 steps were done again: a quarter of 20 s. From 130 to 137 nothing lived; then 5 s to the first batch.
    assert total == {
        "productive": 25,
        "start": 6,
        "restart": 12,
        "checkpoint": 3,
        "data_wait": 4,
        "validation": 5,
        "lost": 5,
    }
    assert sum(total.values()) == 160 - 100
    assert share(total) == pytest.approx(25 / 60)
    assert describe(total).startswith("42% of 60 s productive, start 6 s, restart 12 s")
    # From step 10: all that the second attempt did is lost, and 10 of the first's 20 steps.
    both = read(lines(tmp_path, killed, second, again))
    assert (both["productive"], both["lost"]) == (pytest.approx(10 + 4), pytest.approx(10 + 10))
    assert sum(both.values()) == pytest.approx(170 - 100 - (9 - 9))


@pytest.mark.slow
def test_the_kinds_add_up_to_the_wall_time_across_a_restart(
    flags: list[str], tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture
) -> None:
    monkeypatch.setattr(goodput, "LINE_S", 0.0)
    transfer = DataModule.on_before_batch_transfer

    def slow(self: Any, batch: Any, dataloader_idx: int) -> Any:
        time.sleep(0.01)
        return transfer(self, batch, dataloader_idx)

    monkeypatch.setattr(DataModule, "on_before_batch_transfer", slow)
    flags = [
        *flags,
        "--trainer.max_steps=10",
        "--last_checkpoint.every_n_steps=4",
        "--model.optim.warmup=0",
    ]
    goodput._have_trained.add(os.getpid())  # or the tests before this one would be its start
    began = time.time()
    with pytest.raises(RuntimeError, match="stopped by the test"):
        stop = "tests.support.runs.StopAfter"
        run("fit", *flags, f"--trainer.callbacks+={stop}", "--trainer.callbacks.step=6")
    time.sleep(0.5)
    assert run("fit", *flags, "--ckpt_path=last") == 0
    seconds = read(only_run(tmp_path))
    wall = sum(seconds.values())
    events = [
        json.loads(line) for line in (only_run(tmp_path) / RunFile.GOODPUT).read_text().splitlines()
    ]
    assert wall == pytest.approx(events[-1]["time"] - events[0]["attempt"], abs=0.01)
    assert wall <= time.time() - began + 1.0
    assert seconds["restart"] >= 0.5
    # 40 micro-batches of the first 10 steps and 8 of steps 5 and 6 again; the first of an attempt is its start
    assert seconds["data_wait"] >= (40 + 8 - 2) * 0.01 * 0.9
    assert seconds["lost"] > 0 and seconds["checkpoint"] > 0 and seconds["validation"] > 0
    assert "goodput  " in capsys.readouterr().out
