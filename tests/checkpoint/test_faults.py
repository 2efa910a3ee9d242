"""A real training that is killed inside a save resumes exactly; damaged checkpoints are refused.

test_kill_points.py kills a fake training at every point of a save.
"""

from __future__ import annotations

import os
import resource
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback

from tests.support.kill_points import EXIT_CODE, crash
from tests.support.library import formats as loading
from tests.support.library import manifest, read_full
from tests.support.runs import disk
from tests.support.saves import STEPS, Trainings, assert_same, equal
from tests.support.tiers import tiers

pytestmark = pytest.mark.slow

POINTS = {  # one of each strategy: what is killed, and when
    "ddp": ("write checkpoint.pt", 0),
    "fsdp2": ("write .distcp", 1),
    "zero1": ("written", 1),
    "zero2": ("write optim_states.pt", 0),
    "zero3": ("write optim_states.pt", 1),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("faults"), corpus, cache)


@pytest.mark.parametrize("strategy", tiers(POINTS, daily=["fsdp2", "zero3"]))
def test_a_run_killed_inside_a_save_resumes_exactly(train: Trainings, strategy: str) -> None:
    point, rank = POINTS[strategy]
    kill = partial(crash, point, rank, at_save=2)
    record = train.run(strategy, f"killed-{strategy}", prelude=kill)
    assert record.answers[rank] == f"killed: exit code {EXIT_CODE}", record.error
    folder, expected = record.run / "checkpoints", train.uninterrupted(strategy)
    newest = manifest.newest(folder)
    assert newest is not None and newest.name == manifest.name(1)
    assert_same(newest, expected / newest.name)
    train.run(strategy, f"killed-{strategy}").check()
    assert_same(folder / manifest.name(STEPS), expected / manifest.name(STEPS))
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == [manifest.name(STEPS - 1), manifest.name(STEPS)]


def unverified() -> None:
    """In each worker: the newest checkpoint is loaded unverified."""
    code: Any = loading
    code.agreed = lambda path: manifest.found(path)[0]


@pytest.mark.parametrize("guarded", tiers([True, False], daily=[True]))
def test_all_ranks_skip_a_damaged_checkpoint_together(train: Trainings, guarded: bool) -> None:
    """One bit of a weight is changed; without the guard training resumes from it."""
    expected = train.uninterrupted("ddp")
    folder = train.folder / f"damaged-{guarded}"
    for step in (STEPS - 2, STEPS - 1):
        shutil.copytree(expected / manifest.name(step), folder / manifest.name(step))
    newest = folder / manifest.name(STEPS - 1)
    weight = torch.load(newest / "checkpoint.pt")["state_dict"]["model.model.norm.weight"]
    content = bytearray((newest / "checkpoint.pt").read_bytes())
    content[content.find(weight.numpy().tobytes()) + 2] ^= 1
    (newest / "checkpoint.pt").write_bytes(content)
    flag, prelude = f"--last_checkpoint.dirpath={folder}", None if guarded else unverified
    record = train.run("ddp", f"passes-{guarded}", flag, prelude=prelude).check()
    if guarded:
        assert f"{newest.name} (its checkpoint.pt is not what was written" in record.log(0)
        assert_same(folder / manifest.name(STEPS), expected / manifest.name(STEPS))
    else:
        ends = [read_full(path / manifest.name(STEPS))["state_dict"] for path in (folder, expected)]
        assert not equal(*ends)


class Ballast(Callback):
    """Fills the disk of a folder after step 1 but for a small file; frees it after step 3."""

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


def refuse_rank_1() -> None:
    """In each worker: rank 1's files cannot grow beyond 60 kB, as on a node with a full disk."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2", "zero2"], daily=["fsdp2"]))
def test_on_a_full_disk_training_continues(train: Trainings, tmp_path: Path, strategy: str) -> None:
    with disk(tmp_path / "disk", "16m") as small_disk:
        continues_on(small_disk, train, strategy)


def continues_on(small_disk: Path, train: Trainings, strategy: str) -> None:
    flags = [f"--last_checkpoint.dirpath={small_disk}", "--trainer.max_steps=5"]
    flags += ["--model.optim.schedule=constant"]
    record = train.run(strategy, f"full-{strategy}", *flags, callbacks=[Ballast(small_disk)])
    log = record.log(0)
    assert "step00000002.ckpt was not saved, rank " in log and "GiB are free at /" in log
    assert "the newest valid checkpoint is" in log
    record.check()
    assert log.count("; training continues\n") == 2, "after steps 2 and 3"
    left = sorted(path.name for path in small_disk.glob("*ckpt*"))
    assert left == [manifest.name(4), manifest.name(5)]


@pytest.mark.parametrize("strategy", tiers(["fsdp2", "zero1", "zero3"], daily=["zero3"]))
def test_what_one_rank_cannot_write_ends_on_all_alike(train: Trainings, strategy: str) -> None:
    """DeepSpeed's save has barriers after the writing, at which others would wait forever."""
    name, two = f"refused-{strategy}", "--trainer.max_steps=2"
    record = train.run(strategy, name, two, prelude=refuse_rank_1)
    assert not list((record.run / "checkpoints").iterdir())
    assert record.log(0).count("step00000001.ckpt was not saved, rank 1: ") == 1
    for answer in record.answers.values():  # at the last step training does not continue
        assert answer.startswith("Ended: step00000002.ckpt was not saved, rank 1: "), record.answers
