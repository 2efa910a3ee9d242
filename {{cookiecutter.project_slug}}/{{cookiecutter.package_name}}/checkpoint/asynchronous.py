"""Checkpoints that are written while training goes on.

    training's thread    state → staged copy in host memory      what it waits for; the buffers are used again
    a thread beside it   write aside → hash → commit             as commit.save does, over a process group of its own

The group matters: collectives of two threads in one group meet each other's, and the ranks abort. torch's own
`dcp.async_save` does the first line and half of the second: it neither hashes nor commits, and knows the distributed
format alone. Its stager is used here. What DeepSpeed saves by collectives of training's own groups it is asked for in
training's thread, and each file's content is copied where DeepSpeed would write it (zero.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..parallel import sharded, weights
from ..parallel.mesh import MeshStrategy
from . import commit, zero


class BackgroundSaver:
    """Saves one checkpoint at a time; made by all ranks together.

    Args:
        strategy: Any, without optimizer state on NVMe. Its timeout holds for the ranks' agreement too.
    """

    def __init__(self, strategy: Any) -> None:
        pins = torch.cuda.is_available()  # only there can memory be pinned, and is it worth anything
        options = StagingOptions(
            use_pinned_memory=pins, use_non_blocking_copy=pins, use_shared_memory=False, use_async_staging=False
        )
        self._stager = DefaultStager(options)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._underway: Future[None] | None = None
        timeout = getattr(strategy, "_timeout", None) or default_pg_timeout
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None

    def start(self, trainer: L.Trainer, path: Path) -> None:
        """Copy the present state, and begin to save the copy as `path`; `wait` must have ended the one before.

        Collective.
        """
        assert self._underway is None
        path = Path(weights.broadcast(str(path)))
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        write = self._staged(trainer.strategy, checkpoint)
        self._underway = self._thread.submit(self._save, path, write, commit.describe(trainer))

    def wait(self) -> None:
        """Until what was begun is committed. Collective.

        Raises:
            SaveError: it was not, on any rank; a disk refused it.
        """
        underway, self._underway = self._underway, None
        if underway is not None:
            underway.result()

    def abandon(self) -> None:
        """Let what was begun end as it may, when training has failed: it is committed, or only a folder aside."""
        underway, self._underway = self._underway, None
        if underway is not None:
            underway.exception()

    def close(self) -> None:
        """Give back memory, thread and group."""
        self.abandon()
        self._thread.shutdown()
        self._stager.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _staged(self, strategy: Any, checkpoint: dict[str, Any]) -> Callable[[Path], object]:
        """What writes a copy of `checkpoint`, which training no longer changes, into a folder."""
        if hasattr(strategy, "deepspeed_engine"):
            without_frozen = strategy.exclude_frozen_parameters
            return zero.staged(strategy.deepspeed_engine, checkpoint, without_frozen, self._stager.stage)
        if isinstance(strategy, MeshStrategy):
            parts: Any = self._stager.stage(dict(zip(("tensors", "rest"), sharded.split(checkpoint), strict=True)))
            return lambda aside: sharded.write(parts["tensors"], parts["rest"], aside, self._group)
        if not strategy.is_global_zero:
            return lambda aside: None  # rank 0 has all, and writes it
        copy: Any = self._stager.stage(checkpoint)
        return lambda aside: strategy.checkpoint_io.save_checkpoint(copy, aside)

    def _save(self, path: Path, write: Callable[[Path], object], about: dict[str, Any]) -> None:
        """In the thread; as commit.save. No collective of another group may be called here."""
        aside = commit.begin(path, self._group)
        commit.finish(path, about, commit.disk_trouble(lambda: write(aside)), self._group)
