"""A signal to a run's process, and the end of its time: all ranks stop and save at one step."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import Callback

from dist_template.callbacks.preemption import Vote
from tests.support.library import manifest
from tests.support.runs import Workers, run
from tests.support.tiers import tiers
from tests.support.wings import RunRecord, first_difference

SMALL = ["--trainer.strategy=ddp", "--data.micro_batch_size=2", "--model.optim.learning_rate=0.01"]


class Signal(Callback):
    """Sends `number` to its own process, on `ranks`, in the hook of that name at `step`; or to its
    process group, as a shell's job control does.
    """

    def __init__(
        self, ranks: set[int], step: int, number: int, hook: str, to_group: bool = False
    ) -> None:
        self.ranks, self.step, self.number = ranks, step, number
        self.kill = os.killpg if to_group else os.kill
        vars(self)[hook] = self._send
        self._sent = False

    def _send(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        due = trainer.global_step >= self.step and not trainer.sanity_checking and not self._sent
        if due and trainer.global_rank in self.ranks:
            self._sent = True
            self.kill(os.getpid(), self.number)  # before the hook returns: the next vote has it


class Runs:
    """Runs of one command on two processes: uninterrupted, or stopped and resumed."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder, self.flags = folder, ["fit", *flags, *SMALL]

    def fit(self, name: str, *flags: str, run_id: str | None = None, **options: Any) -> RunRecord:
        with Workers(2) as workers:
            options = {"run_id": run_id or name, "timeout_s": 300} | options
            return workers.run([*self.flags, *flags], self.folder / name, **options)


@pytest.fixture
def runs(flags: list[str], tmp_path: Path) -> Runs:
    run("prepare", *flags)
    return Runs(tmp_path / "records", flags)


def stopped(record: RunRecord, by: str) -> int:
    """After which step all ranks stopped together and saved; 0 if they did not."""
    sentence = re.escape(f"Ended: {by}: stopped and saved after step ") + r"(\d+)"
    found = [re.match(sentence, answer) for answer in record.answers.values()]
    steps = {each and int(each[1]) for each in found}
    return steps.pop() or 0 if len(steps) == 1 else 0


def same_weights(one: RunRecord, other: RunRecord) -> bool:
    return first_difference(one.end, other.end) == ""


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_one_step_and_none_is_lost(runs: Runs) -> None:
    first = runs.fit("first", callbacks=[Signal({1}, 7, signal.SIGTERM, "on_train_batch_start")])
    last = stopped(first, "SIGTERM")
    assert 7 < last < 20, first.answers
    assert (
        manifest.newest(first.run / "checkpoints") == first.run / f"checkpoints/step{last:08}.ckpt"
    )
    second = runs.fit("second", run_id="first").check()
    reference = runs.fit("reference").check()
    assert min(second.rows()) == last + 1 and same_weights(second, reference)


@pytest.mark.slow
def test_a_validation_is_interrupted_and_repeated_after_the_resume(runs: Runs) -> None:
    """Its step may be saved already; the learning rate depends on its result."""
    plateau = ["--model.optim.schedule=reduce_on_plateau", "--model.optim.plateau_patience=0"]
    flags = [
        *plateau, "--last_checkpoint.every_n_steps=5", "--trainer.val_check_interval=5",
        "--data.seq_len=8",
    ]  # fmt: skip
    reference = runs.fit("reference", *flags).check()
    signal_at = Signal({0}, 10, signal.SIGUSR1, "on_validation_batch_start")
    first = runs.fit("first", *flags, callbacks=[signal_at])
    assert stopped(first, "SIGUSR1") == 10 and 10 not in first.eval(), first.answers
    second = runs.fit("second", *flags, run_id="first").check()
    assert second.eval() == {
        step: metrics for step, metrics in reference.eval().items() if step >= 10
    }
    rates, expected = (run.metric("train/learning_rate") for run in (second, reference))
    assert rates == {step: rate for step, rate in expected.items() if step > 10}
    assert same_weights(second, reference)


@pytest.mark.slow
def test_the_time_limit_stops_all_ranks(runs: Runs) -> None:
    record = runs.fit("timed", "--preemption.max_time=00:00:00:03", "--trainer.max_steps=100000")
    assert stopped(record, "preemption.max_time 00:00:00:03 is up"), record.answers


@pytest.mark.slow
@pytest.mark.parametrize("spared", tiers([True, False], daily=[True]))
def test_a_signal_to_a_ranks_process_group_does_not_kill_its_data_workers(
    runs: Runs, spared: bool
) -> None:
    signal_at = Signal({0, 1}, 5, signal.SIGTERM, "on_train_batch_start", to_group=True)
    prelude = os.setpgrp if spared else in_one_group
    record = runs.fit("first", "--data.num_workers=2", callbacks=[signal_at], prelude=prelude)
    assert bool(stopped(record, "SIGTERM")) == spared, record.answers


def in_one_group() -> None:
    """The fault: a rank and its readers are one process group."""
    os.setpgrp()
    vars(os)["setpgid"] = lambda *_: None


def each_for_itself() -> None:
    """The fault that the vote is against."""
    Vote.cast = lambda self, numbers: list(numbers)


@pytest.mark.slow
def test_without_the_vote_a_signal_to_one_rank_breaks_the_run(runs: Runs) -> None:
    signal_at = Signal({1}, 7, signal.SIGTERM, "on_train_batch_start")
    record = runs.fit("red", callbacks=[signal_at], prelude=each_for_itself, timeout_s=12)
    assert not record.ok and not stopped(record, "SIGTERM"), record.answers
