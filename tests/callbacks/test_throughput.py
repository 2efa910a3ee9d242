"""Speed is of training alone, the slow rank is named, and a log step costs one collective."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_template.observe.history import goodput
from lightning.pytorch import Callback
from pytest import MonkeyPatch

from tests.support.library import Rows, commit, read_metrics
from tests.support.parity import STEPS, Trainings
from tests.support.runs import logged, only_run, run
from tests.support.tiers import tiers

SLOW_S = 0.2
SAVE_S = (
    1000.0  # by a clock of the test's own: longer than steps and validations take on any machine
)


def test_a_slow_checkpoint_counts_as_neither_training_nor_waiting(
    flags: list[str], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    save, slept = commit.save, [0.0]

    def slowly(*args: Any, **options: Any) -> Any:
        save(*args, **options)
        slept[0] += SAVE_S

    monkeypatch.setattr(commit, "save", slowly)
    wall, counter = time.time, time.perf_counter
    monkeypatch.setattr(time, "time", lambda: wall() + slept[0])
    monkeypatch.setattr(time, "perf_counter", lambda: counter() + slept[0])
    steps = [
        "--trainer.max_steps=9",
        "--last_checkpoint.every_n_steps=3",
        "--trainer.log_every_n_steps=3",
    ]
    assert (
        run("fit", *flags, *steps, "--trainer.val_check_interval=6", "--model.optim.warmup=1") == 0
    )
    folder = only_run(tmp_path)
    seconds = goodput.read(folder)
    assert seconds["checkpoint"] > 3 * SAVE_S and 0 < seconds["validation"] < SAVE_S
    assert 3 * logged(folder, "perf/step_s")[6] < SAVE_S


class Slow(Callback):
    """Makes one rank's loader, or its forward, slow."""

    def __init__(self, rank: int, what: str) -> None:
        self.rank = rank
        self.what = what

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank != self.rank:
            return
        if self.what == "forward":
            pl_module.model.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))
            return
        quick = Rows.__getitems__

        def slowly(self: Rows, rows: list[int]) -> Any:
            time.sleep(SLOW_S)
            return quick(self, rows)

        Rows.__getitems__ = slowly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "what"), tiers([(0, "loader"), (1, "forward")], daily=[(0, "loader")])
)
def test_the_slow_rank_is_named(train: Trainings, rank: int, what: str) -> None:  # noqa: F811
    steps = ["--trainer.max_steps=6", "--trainer.log_every_n_steps=3"]
    metrics = read_metrics(
        train.run("fit", "llama", "ddp", *steps, callbacks=[Slow(rank, what)]).run
    )
    assert metrics["rank/slowest"].values.tolist() == [rank, rank]
    assert metrics["rank/slowest_over_median"].last > 1.5


class Collectives(Callback):
    """Counts what Python asks of torch.distributed in training."""

    NAMES = (
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "broadcast",
        "barrier",
        "reduce",
    )

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.count = dict.fromkeys(self.NAMES, 0)
        self.real = {name: getattr(dist, name) for name in self.NAMES}
        for name, real in self.real.items():
            setattr(dist, name, self.counted(name, real))

    def counted(self, name: str, real: Any) -> Any:
        def one_more(*args: Any, **options: Any) -> Any:
            # The vote on preemption is a whole number, and cast by the clock.
            is_vote = (
                bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.int64
            )
            self.count[name] += not is_vote
            return real(*args, **options)

        return one_more

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == STEPS - 1:  # the last step saves
            self.file.write_text(json.dumps(self.count))


@pytest.mark.slow
def test_a_log_step_is_one_collective_more(train: Trainings, tmp_path: Path) -> None:  # noqa: F811
    def collectives(every: int) -> dict[str, int]:
        flags = [f"--trainer.log_every_n_steps={every}", "--trainer.limit_val_batches=0"]
        file = tmp_path / f"{every}.json"
        train.run("fit", "deepseek_v3", "ddp", *flags, callbacks=[Collectives(file)])
        return json.loads(file.read_text())

    often, seldom = collectives(3), collectives(9)  # log steps until 11: 3 6 9, and 9
    assert often == seldom | {"all_reduce": seldom["all_reduce"] + 2}
