"""A signal to a run's process, and the end of its time: all ranks stop and save at one step."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import Callback

from dist_template.callbacks.preemption import Vote
from tests.support.library import manifest
from tests.support.runs import Workers, run, small
from tests.support.wings import RunRecord, first_difference

pytestmark = pytest.mark.slow
FLAGS = """--trainer.strategy=ddp --data.micro_batch_size=2 --model.optim.learning_rate=0.01
    --model.optim.schedule=reduce_on_plateau --model.optim.plateau_patience=0 --data.seq_len=8
    --last_checkpoint.every_n_steps=5 --trainer.val_check_interval=5""".split()


class Signal(Callback):
    """Sends `number` to its own process, on `rank`, in the hook of that name at `step`; or to its
    process group, as a shell's job control does.
    """

    def __init__(self, rank: int, step: int, number: int, hook: str, send: Callable) -> None:
        self.rank, self.step, self.number, self.send = rank, step, number, send
        vars(self)[hook] = self._send
        self._sent = False

    def _send(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        due = trainer.global_step >= self.step and not trainer.sanity_checking and not self._sent
        if due and trainer.global_rank == self.rank:
            self._sent = True
            self.send(os.getpid(), self.number)  # before the hook returns: the next vote has it


class Runs:
    """Runs of one command on two processes: uninterrupted, or stopped and resumed."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder, self.flags = folder, ["fit", *flags, *FLAGS]
        assert run("prepare", *self.flags[1:]) == 0
        self.reference = self.fit("reference").check()

    def fit(self, name: str, *flags: str, **options: Any) -> RunRecord:
        return Workers(2).run([*self.flags, *flags], self.folder / name, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Runs:
    folder = tmp_path_factory.mktemp("preemption")
    return Runs(folder / "records", small(corpus, cache, folder))


def stopped(record: RunRecord, by: str) -> int:
    """After which step all ranks stopped together and saved; 0 if they did not."""
    sentence = re.escape(f"Ended: {by}: stopped and saved after step ") + r"(\d+)"
    found = [re.match(sentence, answer) for answer in record.answers.values()]
    steps = {each and int(each[1]) for each in found}
    return steps.pop() or 0 if len(steps) == 1 else 0


def test_a_signal_to_one_ranks_group_stops_all_at_one_step_and_none_is_lost(runs: Runs) -> None:
    """Its data workers are not killed: they are in a process group of their own."""
    signal_at = Signal(1, 7, signal.SIGTERM, "on_train_batch_start", os.killpg)
    options: Any = {"callbacks": [signal_at], "prelude": os.setpgrp}
    first = runs.fit("trained", "--data.num_workers=2", **options)
    last = stopped(first, "SIGTERM")
    assert 7 < last < 20, first.answers
    checkpoints = first.run / "checkpoints"
    assert manifest.newest(checkpoints) == checkpoints / manifest.name(last)
    second = runs.fit("trained-again", run_id="trained").check()
    assert min(second.rows()) == last + 1
    assert first_difference(second.end, runs.reference.end) == ""


def test_a_validation_is_interrupted_and_repeated_after_the_resume(runs: Runs) -> None:
    """Its step may be saved already; the learning rate depends on its result."""
    signal_at = Signal(0, 10, signal.SIGUSR1, "on_validation_batch_start", os.kill)
    first = runs.fit("validated", callbacks=[signal_at])
    assert stopped(first, "SIGUSR1") == 10 and 10 not in first.eval(), first.answers
    second = runs.fit("validated-again", run_id="validated").check()
    expected = runs.reference.eval()
    assert second.eval() == {step: expected[step] for step in expected if step >= 10}
    rates, expected = (each.metric("train/learning_rate") for each in (second, runs.reference))
    assert rates == {step: rate for step, rate in expected.items() if step > 10}
    assert first_difference(second.end, runs.reference.end) == ""


def test_the_time_limit_stops_all_ranks(runs: Runs) -> None:
    record = runs.fit("timed", "--preemption.max_time=00:00:00:03", "--trainer.max_steps=100000")
    assert stopped(record, "preemption.max_time 00:00:00:03 is up"), record.answers


def each_for_itself() -> None:
    """The fault that the vote is against."""
    Vote.cast = lambda self, numbers: list(numbers)


def test_without_the_vote_a_signal_to_one_rank_breaks_the_run(runs: Runs) -> None:
    signal_at = Signal(1, 7, signal.SIGTERM, "on_train_batch_start", os.kill)
    record = runs.fit("red", callbacks=[signal_at], prelude=each_for_itself, timeout_s=12)
    assert not record.ok and not stopped(record, "SIGTERM"), record.answers
