"""A disk that fills up, on every rank or on one: training goes on or stops by choice, and what stood before stands."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import Callback

from tests.support.library import manifest
from tests.support.runs import disk
from tests.support.saves import Trainings
from tests.support.tiers import tiers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("faults"), corpus, cache)


class Ballast(Callback):
    """Fill the disk after step 1 but for what a small file takes; free it after step 3.

    Args:
        folder: On that disk.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "ballast"

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.strategy.barrier()
        if trainer.is_global_zero and trainer.global_step == 1:
            free = shutil.disk_usage(self.file.parent).free
            self.file.write_bytes(bytes(max(0, free - 40_000)))
        if trainer.is_global_zero and trainer.global_step == 3:
            self.file.unlink()
        trainer.strategy.barrier()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", "16m") as folder:
        yield folder


def refuse_rank_1() -> None:
    """In each worker: rank 1's files cannot grow beyond 60 kB, as where its node's disk alone is full."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2", "zero2"], daily=["fsdp2"]))
def test_on_a_full_disk_training_continues(
    train: Trainings, small_disk: Path, strategy: str
) -> None:
    flags = [
        f"--last_checkpoint.dirpath={small_disk}",
        "--trainer.max_steps=5",
        "--model.optim.schedule=constant",
    ]
    record = train.run(strategy, f"full-{strategy}", *flags, callbacks=[Ballast(small_disk)])
    log = record.log(0)
    assert "step00000002.ckpt was not saved, rank " in log and "GiB are free at /" in log
    assert "the newest valid checkpoint is" in log
    record.check()
    assert log.count("; training continues\n") == 2, "after steps 2 and 3"
    left = sorted(path.name for path in small_disk.glob("*ckpt*"))
    assert left == [manifest.name(4), manifest.name(5)]


@pytest.mark.parametrize("strategy", tiers(["fsdp2", "zero1", "zero3"], daily=["zero3"]))
def test_what_one_rank_cannot_write_ends_on_all_ranks_alike(
    train: Trainings, strategy: str
) -> None:
    """DeepSpeed's save has barriers after the writing, at which the other ranks would wait forever."""
    record = train.run(
        strategy, f"refused-{strategy}", "--trainer.max_steps=2", prelude=refuse_rank_1
    )
    assert not list((record.run / "checkpoints").iterdir())
    assert record.log(0).count("step00000001.ckpt was not saved, rank 1: ") == 1
    for answer in record.answers.values():  # at the last step training does not go on
        assert answer.startswith("Ended: step00000002.ckpt was not saved, rank 1: "), record.answers
