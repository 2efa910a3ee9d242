"""Saves in the background equal those that training waits for; a disk's refusal ends no training.

A rank is killed at every point of a save, and a valid checkpoint is left: two forked processes save
a fake training, whose "step" adds 1 to the weights."""

import multiprocessing
import os
import re
import resource
import shutil
import time
import zipfile
from collections.abc import Callable, Container
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dist_template.callbacks import LastCheckpoint
from dist_template.checkpoint import commit, formats, manifest
from dist_template.checkpoint.formats import read_full
from dist_template.parallel.mesh import format as sharded
from dist_template.parallel.zero.format import ZeroFormat
from dist_template.wings.rehearse.interventions import KillAt
from dist_template.wings.rehearse.record import RunRecord
from tests.support.runs import disk, only_run, run, small
from tests.support.saves import Trainings, crash
from tests.support.tiers import tiers

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
        *small(corpus, folder / "cache", folder),
        f"--data.source.paths=[{corpus}/0*.txt]",
        "--data.validation_share=0",
        "--data.test_share=0",
        "--model.optim.warmup=2",
        f"--trainer.max_steps={STEPS + 3}",
        "--trainer.logger=false",
        "--data.micro_batch_size=4",
        f"--last_checkpoint.every_n_steps={EVERY}",
        "--last_checkpoint.asynchronous=true",
    ]
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


RANKS, TIMEOUT = 2, timedelta(seconds=20)


def weight_of(step: int) -> Tensor:
    """The weights after `step`, of shape (8,)."""
    return torch.arange(8.0) + step


def write_file(folder: Path, weight: Tensor) -> None:
    """As DDP: rank 0 writes."""
    if dist.get_rank() == 0:
        torch.save({"state_dict": {"weight": weight}}, folder / formats.FILE)


def write_shards(folder: Path, weight: Tensor) -> None:
    """As FSDP2: each rank writes its shard, in torch's distributed format."""
    weight = distribute_tensor(weight, init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    sharded.write({"state_dict": {"weight": weight}}, {}, folder)


def write_partitions(folder: Path, weight: Tensor) -> None:
    """As ZeRO: each rank writes two files, which DeepSpeed's engine passes to the library."""
    rank = dist.get_rank()
    half = weight.chunk(RANKS)[rank].clone()

    def save_checkpoint(path: Path, tag: str, *_: Any, **options: Any) -> None:
        for kind in ("model", "optim"):
            files.save({"weight": half}, path / tag / f"rank{rank}_{kind}_states.pt")

    # torch.save is looked up at each call: `crash` replaces it
    files = SimpleNamespace(save=lambda *args: torch.save(*args), makedirs=os.makedirs)
    engine = SimpleNamespace(checkpoint_engine=files, save_checkpoint=save_checkpoint)
    engine._copy_recovery_script = None
    strategy: Any = SimpleNamespace(deepspeed_engine=engine, exclude_frozen_parameters=False)
    ZeroFormat(strategy).save({}, folder)


WRITERS = {"ddp": write_file, "fsdp2": write_shards, "zero": write_partitions}


def weight_in(path: Path) -> Tensor:
    if partitions := sorted(path.glob("*/*_optim_states.pt")):
        return torch.cat([torch.load(file)["weight"] for file in partitions])
    return read_full(path)["state_dict"]["weight"]


def launch(kind: str, folder: Path, last: int, arm: Callable[[], object] | None = None) -> Any:
    """Resumes from `folder` on two processes, calls `arm` and saves after each step up to `last`.

    Returns the exit codes by rank: 0 done, 1 an error, as of gloo when the other rank is gone."""
    store, fork = f"{folder}-{time.monotonic_ns()}", multiprocessing.get_context("fork")
    processes = []
    for rank in range(RANKS):
        processes.append(
            fork.Process(target=resume_and_save, args=(kind, folder, last, arm, rank, store))
        )
        processes[-1].start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def resume_and_save(kind: str, folder: Path, last: int, arm: Any, rank: int, store: str) -> None:
    os.environ["RANK"] = str(rank)
    files = dist.FileStore(store, RANKS)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    step = 0
    if manifest.found(folder):
        newest = manifest.agreed(folder)
        step = manifest.step_of(newest)
        assert torch.equal(weight_in(newest), weight_of(step))
    if rank == 0:
        commit.clear(folder)
    dist.barrier()
    if arm:
        arm()
    for number in range(step + 1, last + 1):
        write = partial(WRITERS[kind], weight=weight_of(number))
        commit.write_into(folder / manifest.name(number), {"step": number}, write)


def step_in(folder: Path) -> int:
    newest = manifest.newest(folder)
    assert newest is not None and manifest.damage(newest) is None
    step = manifest.step_of(newest)
    assert torch.equal(weight_in(newest), weight_of(step))
    return step


EVERYWHERE = [(kind, "") for kind in WRITERS]  # the operations after the writing are the same
KILLS = [EVERYWHERE[0], ("fsdp2", "save"), ("zero", "save")]


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(("kind", "operation"), tiers([*KILLS, *EVERYWHERE[1:]], daily=KILLS))
def test_a_kill_leaves_a_checkpoint(kind: str, operation: str, rank: int, tmp_path: Path) -> None:
    """Each launch replaces a torn checkpoint, and is killed one operation later than the last."""
    folder, step, committed = tmp_path / "checkpoints", 1, []
    assert launch(kind, folder, last=step) == [0, 0]
    for number in count(1):
        (folder / manifest.name(step + 1)).mkdir(exist_ok=True)
        kill = partial(crash, rank, number, step + 1, operation)
        codes = launch(kind, folder, step + 1, kill)
        if codes == [0, 0]:  # the save has fewer operations
            break
        assert codes[rank] == -SIGKILL and codes[1 - rank] in (0, 1), (number, codes)
        committed.append(step_in(folder) - step)
        step += committed[-1]
    assert committed == sorted(committed) and set(committed) == ({0} if operation else {0, 1})
    assert step_in(folder) == step + 1
    assert not list(folder.glob(".*")), "nothing of the killed saves is left"


def in_place_and_unverified() -> None:
    """Every save overwrites one folder. Rank 1 is killed before it writes its part of step 3."""
    code: Any = commit

    def begin(path: Path, *_: Any) -> Path:
        (path.parent / manifest.name(0)).mkdir(parents=True, exist_ok=True)
        return path.parent / manifest.name(0)

    code.begin, code.finish = begin, lambda *args: (dist.barrier(), {})
    crash(1, number=3, step=3, operation="save")


def test_without_the_protocol_a_killed_save_is_a_mixture_of_two_steps(tmp_path: Path) -> None:
    """DeepSpeed's files of two steps load without an error, as weights of neither."""
    codes = launch("zero", tmp_path / "checkpoints", last=3, arm=in_place_and_unverified)
    assert codes[1] == -SIGKILL
    mixed = weight_in(tmp_path / "checkpoints" / manifest.name(0))
    assert torch.equal(mixed, torch.cat([weight_of(3)[:4], weight_of(2)[4:]]))
