"""Two forked processes that save and load the checkpoints of a fake training in milliseconds.

The fake strategies write the files of the real formats by the library's own writers. One "step"
adds 1 to the weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dist_template.checkpoint import zero
from tests.support.library import commit, formats, manifest, sharded

RANKS = 2
LOST = 17  # exit code of a rank that outlives the killed one
TIMEOUT_S = 20


def weight_of(step: int) -> torch.Tensor:
    """The weights after `step`, of shape (8,)."""
    return torch.arange(8.0) + step


class FakeDdp:
    """Rank 0 writes one file."""

    name = "ddp"

    def save_checkpoint(self, checkpoint: dict[str, Any], folder: Path) -> None:
        if dist.get_rank() == 0:
            torch.save(checkpoint, folder / formats.FILE)

    @staticmethod
    def load(path: Path) -> torch.Tensor:
        return formats.read_full(path)["state_dict"]["weight"]


class FakeMesh(FakeDdp):
    """Each rank writes its shard in torch's distributed format."""

    name = "fsdp2"

    def save_checkpoint(self, checkpoint: dict[str, Any], folder: Path) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        weight = distribute_tensor(checkpoint["state_dict"]["weight"], mesh, [Shard(0)])
        sharded.write(
            {"state_dict": {"weight": weight}}, {"global_step": checkpoint["global_step"]}, folder
        )


class FakeZero(FakeDdp):
    """Each rank writes DeepSpeed's two files, between barriers as DeepSpeed does."""

    name = "zero"

    def __init__(self) -> None:
        # Looked up at each call: kill points replace it.
        files = SimpleNamespace(
            save=lambda content, file: torch.save(content, file), makedirs=os.makedirs
        )
        self.deepspeed_engine = SimpleNamespace(
            checkpoint_engine=files, save_checkpoint=self._save, _copy_recovery_script=None
        )
        self.exclude_frozen_parameters = False
        self.weight = torch.empty(0)

    def save_checkpoint(self, checkpoint: dict[str, Any], folder: Path) -> None:
        self.weight = checkpoint["state_dict"]["weight"]
        zero.ZeroFormat(self).save(checkpoint, folder)  # ty: ignore[invalid-argument-type]

    def _save(self, path: Path, tag: str, rest: dict[str, Any], **options: Any) -> None:
        rank = dist.get_rank()
        half = self.weight.chunk(RANKS)[rank].clone()
        dist.barrier()
        for kind, content in (("model_states", rest), ("optim_states", {"weight": half})):
            self.deepspeed_engine.checkpoint_engine.save(
                content, path / tag / f"rank{rank}_{kind}.pt"
            )
        dist.barrier()

    @staticmethod
    def load(path: Path) -> torch.Tensor:
        files = [path / zero.TAG / f"rank{rank}_optim_states.pt" for rank in range(RANKS)]
        return torch.cat([torch.load(file)["weight"] for file in files])


STRATEGIES: list[type[FakeDdp]] = [FakeDdp, FakeMesh, FakeZero]


def trainer_of(strategy: FakeDdp, step: int) -> Any:
    """What commit.save reads of a Trainer."""
    checkpoint = {"state_dict": {"weight": weight_of(step)}, "global_step": step}
    connector = SimpleNamespace(dump_checkpoint=lambda weights_only: checkpoint)
    given = {"global_step": step, "world_size": RANKS, "strategy": strategy, "callbacks": []}
    return SimpleNamespace(**given, _checkpoint_connector=connector)


def launch(
    strategy: type[FakeDdp], folder: Path, last: int, arm: Callable[[], object] | None = None
) -> list[int]:
    """Resumes from `folder` on two forked processes and saves after each step up to `last`.

    Args:
        strategy: Creates the strategy in each process.
        folder: For checkpoints.
        last: Number of the last step.
        arm: Called in each process before it starts to save.

    Returns:
        The exit codes by rank: 0 done, LOST for a rank that has lost the other one.
    """
    store = folder.parent / f"store-{time.monotonic_ns()}"
    processes = [
        _fork(lambda rank=rank: _train(strategy, folder, last, rank, store, arm))
        for rank in range(RANKS)
    ]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]


def _fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except (RuntimeError, commit.SaveError):  # gloo's, when the other rank is gone
        code = LOST
    finally:
        os._exit(code)


def _train(
    strategy: type[FakeDdp],
    folder: Path,
    last: int,
    rank: int,
    store: Path,
    arm: Callable[[], object] | None,
) -> None:
    os.environ["RANK"] = str(rank)
    timeout = timedelta(seconds=TIMEOUT_S)
    shared = dist.FileStore(str(store), RANKS)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=RANKS, timeout=timeout)
    step = 0
    if manifest.found(folder):
        newest = manifest.agreed(folder)
        step = manifest.step_of(newest)
        assert torch.equal(strategy.load(newest), weight_of(step))
    if rank == 0:
        commit.clear(folder)
    dist.barrier()
    if arm:
        arm()
    for number in range(step + 1, last + 1):
        commit.save(trainer_of(strategy(), number), folder / manifest.name(number))
