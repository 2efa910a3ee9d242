"""A rank is killed at every point of a save: a valid checkpoint is left, the old or the new one.

Two forked processes save a fake training, whose "step" adds 1 to the weights."""

import multiprocessing
import os
import time
from collections.abc import Callable
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
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.library import ZeroFormat, commit, formats, manifest, read_full, sharded
from tests.support.saves import crash
from tests.support.tiers import tiers

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
        processes.append(fork.Process(target=train, args=(kind, folder, last, arm, rank, store)))
        processes[-1].start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def train(kind: str, folder: Path, last: int, arm: Any, rank: int, store: str) -> None:
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
CASES = [EVERYWHERE[0], ("fsdp2", "save"), ("zero", "save")]


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(("kind", "operation"), tiers([*CASES, *EVERYWHERE[1:]], daily=CASES))
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
