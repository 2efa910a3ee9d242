"""Checkpoints written in the background equal those that training waits for, and are as safe."""

from __future__ import annotations

import functools
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from pytest import MonkeyPatch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.staging import DefaultStager

from dist_template.callbacks import LastCheckpoint
from tests.support.library import commit, formats, manifest, read_full, sharded
from tests.support.runs import Workers, only_run, run, small
from tests.support.strategies import flags_of
from tests.support.tiers import tiers
from tests.support.wings import KillAt, RunRecord, first_difference

STEPS, EVERY = 8, 4  # optimizer steps: of the run, between two checkpoints
SLOW_S = 1.0  # a save's wait before it writes; several steps are done in it


def write_late(delay_s: float = SLOW_S) -> None:
    """Every write in the background starts some steps later."""
    begin = commit.begin

    def late(*args: Any) -> Path:
        time.sleep(delay_s)
        return begin(*args)

    commit.begin = late  # ty: ignore[invalid-assignment]


def write_never() -> None:
    """A write in the background does not finish before the process exits."""
    finish = commit.finish

    def never(path: Path, *args: Any, **kwargs: Any) -> None:
        if manifest.step_of(path) > EVERY:
            time.sleep(60)
        finish(path, *args, **kwargs)

    commit.finish = never  # ty: ignore[invalid-assignment]


def stage_nothing() -> None:
    """Training changes the tensors that are written."""
    DefaultStager._stage = lambda self, state_dict, **kwargs: state_dict
    write_late()


class Trainings:
    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder, self.flags = folder, flags
        with Workers(1) as workers:
            workers.run(["prepare", *flags], folder / "prepare").check()

    @functools.cache  # noqa: B019
    def synchronous(self, strategy: str) -> Path:
        """The checkpoints of a run that waits for each."""
        more = "--last_checkpoint.asynchronous=false"
        return self(f"{strategy}-synchronous", strategy, more).check().run / "checkpoints"

    def __call__(self, name: str, strategy: str, *extra: str, **options: Any) -> RunRecord:
        argv = ["fit", *self.flags, *flags_of(strategy), f"--run.name={name}", *extra]
        record = self.folder / f"{len(list(self.folder.iterdir()))}-{name}"
        with Workers(2) as workers:
            return workers.run(argv, record, run_id=name, **options)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Trainings:
    folder = tmp_path_factory.mktemp("asynchronous")
    flags = [
        *small(corpus, folder / "cache", folder), f"--data.source.paths=[{corpus}/0*.txt]",
        "--data.validation_share=0", "--data.test_share=0", "--model.optim.warmup=2",
        f"--trainer.max_steps={STEPS}", "--trainer.logger=false", "--data.micro_batch_size=4",
        f"--last_checkpoint.every_n_steps={EVERY}", "--last_checkpoint.asynchronous=true",
        "--trainer.devices=2",
    ]  # fmt: skip
    (folder / "records").mkdir()
    return Trainings(folder / "records", flags)


CASES: list[Any] = [(strategy, write_late) for strategy in ("fsdp2", "zero3", "ddp")]
CASES += [("fsdp2", stage_nothing)]


def difference(expected: Path, got: Path) -> str:
    """The first tensor of weights or moments to differ; "" if none does."""
    want, have = read_full(expected), read_full(got)
    assert have["global_step"] == want["global_step"] and have["DataModule"] == want["DataModule"]
    found = first_difference(want["state_dict"], have["state_dict"])
    for name, values in want["optimizer_states"][0]["state"].items():
        moments = have["optimizer_states"][0]["state"][name]
        other = [key for key in values if not torch.equal(values[key], moments[key])]
        found = found or (f"{name} {other[0]}" if other else "")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "fault"), tiers(CASES, daily=CASES[:2]))
def test_a_checkpoint_is_of_one_step(train: Trainings, strategy: str, fault: Any) -> None:
    expected = train.synchronous(strategy)
    got = train(f"{strategy}-{fault.__name__}", strategy, prelude=fault).check().run / "checkpoints"
    names = [path.name for path in manifest.found(got)]
    assert names == [manifest.name(STEPS), manifest.name(EVERY)]
    assert all(manifest.damage(path) is None for path in manifest.found(got))
    found = difference(expected / manifest.name(EVERY), got / manifest.name(EVERY))
    assert bool(found) == (fault is stage_nothing)
    assert not difference(expected / manifest.name(STEPS), got / manifest.name(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2"], daily=["fsdp2"]))
def test_a_kill_during_a_write_leaves_the_one_before(train: Trainings, strategy: str) -> None:
    name = f"{strategy}-killed"
    more = f"--trainer.max_steps={STEPS + 3}"
    killed = train(name, strategy, more, prelude=write_never, callbacks=[KillAt(STEPS + 2)])
    assert killed.was_killed
    folder = killed.run / "checkpoints"
    assert manifest.newest(folder) == folder / manifest.name(EVERY)
    assert list(folder.glob(".*.tmp")), "the kill must have come during the write"
    resumed = train(name, strategy, more).check()
    assert min(resumed.loss) == EVERY + 1
    assert manifest.newest(folder) == folder / manifest.name(STEPS + 3)
    assert not list(folder.glob(".*"))


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


def test_a_running_write_is_waited_for(
    flags: list[str], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """By a save that must be there on return, by the next one, and when training fails."""
    monkeypatch.setattr(commit, "begin", commit.begin)  # is restored
    write_late(0.3)
    flags = [*flags, "--last_checkpoint.asynchronous=true", "--last_checkpoint.every_n_steps=2"]
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run("fit", *flags, f"--trainer.callbacks+={__name__}.SaveThenFail")
    folder = only_run(tmp_path) / "checkpoints"
    assert [manifest.step_of(path) for path in manifest.found(folder)] == [4, 3, 2]
    assert not list(folder.glob(".*"))
    assert all(manifest.damage(path) is None for path in manifest.found(folder))
    archives = [zipfile.ZipFile(path / formats.FILE) for path in manifest.found(folder)]
    assert not any(entry.CRC for archive in archives for entry in archive.infolist())


def test_the_thread_does_not_wait_for_training(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """torch's writer copies ahead where there is a GPU, and then waits on training's stream."""
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = {f"weight_{n}": torch.full((300_000,), n) for n in range(3)}
    sharded.write(tensors, {}, tmp_path, dist.new_group(backend="gloo"))
    loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert all(loaded[name].equal(tensor) for name, tensor in tensors.items())


def test_the_thread_uses_its_ranks_own_gpu(monkeypatch: MonkeyPatch) -> None:
    """Not GPU 0, where the thread of each rank would make a context."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(commit, "DefaultStager", lambda options: None)
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        strategy: Any = SimpleNamespace(root_device=device)
        commit.BackgroundSaver(strategy)._thread.submit(int).result()
    assert chosen == [torch.device("cuda", 3)]
