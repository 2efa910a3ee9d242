"""Saves in the background equal those that training waits for; a disk's refusal ends none."""

import re
import resource
import shutil
import time
import zipfile
from collections.abc import Container
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed.checkpoint.staging import DefaultStager

from dist_template.callbacks import LastCheckpoint
from tests.support.library import commit, formats, manifest
from tests.support.runs import disk, only_run, run, small
from tests.support.saves import Trainings
from tests.support.tiers import tiers
from tests.support.wings import KillAt, RunRecord

UNLIMITED = resource.RLIM_INFINITY
STEPS, EVERY = 8, 4  # optimizer steps: of the second checkpoint, between two checkpoints


def write_late(delay_s: float, steps: Container[int]) -> None:
    """Writes of these checkpoints in the background start later."""
    code: Any = commit
    begin = code.begin

    def late(path: Path, *args: Any) -> Path:
        time.sleep(delay_s if manifest.step_of(path) in steps else 0)
        return begin(path, *args)

    code.begin = late


def write_one() -> None:
    """The first checkpoint is written some steps later, and the second is never finished."""
    code: Any = commit
    finish = code.finish

    def never(path: Path, *args: Any) -> Any:
        time.sleep(60 if manifest.step_of(path) == STEPS else 0)
        return finish(path, *args)

    code.finish = never
    write_late(1.0, [EVERY])


def stage_nothing() -> None:
    """Training changes the tensors that are written."""
    DefaultStager._stage = lambda self, state_dict, **kwargs: state_dict
    write_one()


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Trainings:
    folder = tmp_path_factory.mktemp("saves")
    flags = [
        *small(corpus, folder / "cache", folder), f"--data.source.paths=[{corpus}/0*.txt]",
        "--data.validation_share=0", "--data.test_share=0", "--model.optim.warmup=2",
        f"--trainer.max_steps={STEPS + 3}", "--trainer.logger=false", "--data.micro_batch_size=4",
        f"--last_checkpoint.every_n_steps={EVERY}", "--last_checkpoint.asynchronous=true",
    ]  # fmt: skip
    return Trainings(folder, flags)


CASES: list[Any] = [(strategy, write_one) for strategy in ("fsdp2", "zero3", "ddp")]
CASES += [("fsdp2", stage_nothing)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "fault"), tiers(CASES, daily=CASES[:2]))
def test_a_kill_leaves_the_checkpoint_before(train: Trainings, strategy: str, fault: Any) -> None:
    """Training resumes from it with the losses and norms that it had before the kill."""
    name = f"{strategy}-{fault.__name__}"
    killed = train(name, strategy, prelude=fault, callbacks=[KillAt(STEPS + 2)])
    assert killed.was_killed, killed.error
    folder = killed.run / "checkpoints"
    assert manifest.newest(folder) == folder / manifest.name(EVERY)
    assert list(folder.glob(".*.tmp")), "the kill must have come during the write"
    resumed = train(name, strategy).check()
    assert min(resumed.loss) == EVERY + 1

    def numbers(record: RunRecord) -> list[tuple[float, float]]:
        steps = range(EVERY + 1, STEPS + 2)
        return [(record.loss[step], record.grad_norm[step]) for step in steps]

    assert (numbers(resumed) == numbers(killed)) == (fault is write_one)
    assert manifest.newest(folder) == folder / manifest.name(STEPS + 3)
    assert not list(folder.glob(".*"))


class Refusals(Callback):
    """After steps 1 and 4 no file can be written but for small ones; after step 3 all can: the file
    system of the folder `full` is filled, or with None rank 1's files cannot grow."""

    def __init__(self, full: Path | None) -> None:
        self.full = full

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.strategy.barrier()
        is_free = {1: False, 3: True, 4: False}.get(trainer.global_step)
        if is_free is not None and trainer.global_rank == (self.full is None):
            self.free() if is_free else self.fill()
        trainer.strategy.barrier()

    def fill(self) -> None:
        if self.full:
            free = shutil.disk_usage(self.full).free
            (self.full / "ballast").write_bytes(bytes(max(0, free - 40_000)))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, UNLIMITED))

    def free(self) -> None:
        if self.full:
            (self.full / "ballast").unlink()
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))


REFUSALS = [("fsdp2", True), ("zero3", False), ("ddp", True), ("zero2", True), ("zero1", False)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "is_full"), tiers(REFUSALS, daily=REFUSALS[:2]))
def test_training_continues_if_a_disk_refuses_and_all_ranks_end_at_the_last_step(
    train: Trainings, tmp_path: Path, strategy: str, is_full: bool
) -> None:
    """One rank's too: DeepSpeed's save has barriers, at which the others would wait forever."""
    with disk(tmp_path / "disk", "16m") if is_full else nullcontext(tmp_path) as folder:
        flags = ["--trainer.max_steps=5", "--last_checkpoint.every_n_steps=1"]
        flags += [f"--last_checkpoint.dirpath={folder}", "--last_checkpoint.asynchronous=false"]
        acts = [Refusals(folder if is_full else None)]
        record = train(f"{strategy}-refused", strategy, *flags, callbacks=acts, timeout_s=60)
        left = sorted(path.name for path in folder.glob("*ckpt*"))
    log = record.log(0)
    assert left == [manifest.name(1), manifest.name(4)], log
    assert log.count("; training continues\n") == 3
    for step, valid in ((2, 1), (3, 1), (5, 4)):
        said = f"{manifest.name(step)} was not saved, rank {'.' if is_full else '1'}: .* GiB are"
        said += f" free at .*; the newest valid checkpoint is {folder / manifest.name(valid)}"
        assert re.search(said, log), log
    for answer in record.answers.values():
        assert answer.startswith(f"Ended: {manifest.name(5)} was not saved, rank "), answer


class SaveThenFail(Callback):
    """`save_now` while a save is under way, then an error while another is."""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        (last,) = (each for each in trainer.callbacks if isinstance(each, LastCheckpoint))
        if trainer.global_step == 3:
            assert last.save_now(trainer)
            assert [manifest.step_of(path) for path in manifest.found(last.folder)] == [3, 2]
        if trainer.global_step == 5:
            raise RuntimeError("stopped by the test")


@pytest.mark.slow
def test_a_running_write_is_waited_for(flags: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    """By a save that must be there on return, by the next one, and when training fails."""
    monkeypatch.setattr(commit, "begin", commit.begin)  # is restored
    write_late(0.3, range(9))
    flags = [*flags, "--last_checkpoint.asynchronous=true", "--last_checkpoint.every_n_steps=2"]
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run("fit", *flags, f"--trainer.callbacks+={__name__}.SaveThenFail")
    folder = only_run(tmp_path) / "checkpoints"
    saved = manifest.found(folder)
    assert [manifest.step_of(path) for path in saved] == [4, 3, 2] and not list(folder.glob(".*"))
    for path in saved:
        assert manifest.damage(path) is None
        assert not any(entry.CRC for entry in zipfile.ZipFile(path / formats.FILE).infolist())


def test_the_thread_uses_its_ranks_own_gpu(monkeypatch: Any) -> None:
    """Not GPU 0, where the thread of each rank would make a context."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(commit, "DefaultStager", lambda options: None)
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        strategy: Any = SimpleNamespace(root_device=device)
        commit.BackgroundSaver(strategy)._thread.submit(int).result()
    assert chosen == [torch.device("cuda", 3)]
