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
from tests.support.runs import small
from tests.support.saves import Trainings
from tests.support.wings import RunRecord, first_difference

pytestmark = pytest.mark.slow
FLAGS = """--data.micro_batch_size=2 --model.optim.learning_rate=0.01
    --lr_scheduler=ReduceLROnPlateau --lr_scheduler.monitor=eval/loss --lr_scheduler.patience=0
    --data.seq_len=8 --last_checkpoint.every_n_steps=5 --trainer.val_check_interval=5""".split()


class Signal(Callback):
    """Sends `number` to its process, or its process group, on `rank`, in a hook at `step`."""

    def __init__(self, rank: int, step: int, number: int, hook: str, send: Callable) -> None:
        self.rank, self.step, self.number, self.send = rank, step, number, send
        vars(self)[hook] = self._send
        self._sent = False

    def _send(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        due = trainer.global_step >= self.step and not trainer.sanity_checking and not self._sent
        if due and trainer.global_rank == self.rank:
            self._sent = True
            self.send(os.getpid(), self.number)  # before the hook returns: the next vote has it


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Trainings:
    folder = tmp_path_factory.mktemp("preemption")
    return Trainings(folder, [*small(corpus, cache, folder), *FLAGS])


@pytest.fixture(scope="module")
def whole(train: Trainings) -> RunRecord:
    """The run that is never stopped."""
    return train("whole", "ddp").check()


def stopped(record: RunRecord, by: str) -> int:
    """After which step all ranks stopped together and saved; 0 if they did not."""
    sentence = re.escape(f"Ended: {by}: stopped and saved after step ") + r"(\d+)"
    found = [re.match(sentence, answer) for answer in record.answers.values()]
    steps = {each and int(each[1]) for each in found}
    return steps.pop() or 0 if len(steps) == 1 else 0


def test_a_signal_to_a_rank_stops_all_and_loses_no_step(train: Trainings, whole: RunRecord) -> None:
    """Its data workers are not killed: they are in a process group of their own."""
    signal_at = Signal(1, 7, signal.SIGTERM, "on_train_batch_start", os.killpg)
    options: Any = {"callbacks": [signal_at], "prelude": os.setpgrp}
    first = train("trained", "ddp", "--data.num_workers=2", **options)
    last = stopped(first, "SIGTERM")
    assert 7 < last < 20, first.answers
    checkpoints = first.run / "checkpoints"
    assert manifest.newest(checkpoints) == checkpoints / manifest.name(last)
    second = train("trained", "ddp").check()
    assert min(second.rows()) == last + 1
    assert first_difference(second.end, whole.end) == ""


def test_an_interrupted_validation_is_repeated(train: Trainings, whole: RunRecord) -> None:
    """Its step may be saved already; the learning rate depends on its result."""
    signal_at = Signal(0, 10, signal.SIGUSR1, "on_validation_batch_start", os.kill)
    first = train("validated", "ddp", callbacks=[signal_at])
    assert stopped(first, "SIGUSR1") == 10 and 10 not in first.eval(), first.answers
    second = train("validated", "ddp").check()
    expected = whole.eval()
    assert second.eval() == {step: expected[step] for step in expected if step >= 10}
    rates, expected = (each.metric("train/learning_rate") for each in (second, whole))
    assert rates == {step: rate for step, rate in expected.items() if step > 10}
    assert first_difference(second.end, whole.end) == ""


def test_the_time_limit_stops_all_ranks(train: Trainings) -> None:
    limits = ["--preemption.max_time=00:00:00:03", "--trainer.max_steps=100000"]
    record = train("timed", "ddp", *limits)
    assert stopped(record, "preemption.max_time 00:00:00:03 is up"), record.answers


def each_for_itself() -> None:
    """The fault that the vote is against."""
    Vote.cast = lambda self, numbers: list(numbers)


def test_without_the_vote_a_signal_to_one_rank_breaks_the_run(train: Trainings) -> None:
    signal_at = Signal(1, 7, signal.SIGTERM, "on_train_batch_start", os.kill)
    record = train("red", "ddp", callbacks=[signal_at], prelude=each_for_itself, timeout_s=12)
    assert not record.ok and not stopped(record, "SIGTERM"), record.answers
