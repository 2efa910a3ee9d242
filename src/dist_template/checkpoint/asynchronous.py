"""Writes checkpoints in the background: training waits for a copy, which a thread writes.

The thread does what commit.save does, over a process group of its own: collectives that two threads
start in one group would be paired with each other, and the ranks would abort. torch's
`dcp.async_save` covers only the distributed format, and neither hashes nor commits; its stager,
which copies to pinned memory and reuses that memory, is used here. DeepSpeed saves by collectives
of the training groups, so its save runs in training's thread, and each file's content is copied
where DeepSpeed would write it (zero.py)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from .. import weights
from ..compat.lightning import checkpoint_of, timeout_of
from . import commit
from .formats import format_for


class BackgroundSaver:
    """Saves one checkpoint at a time. All ranks create it together.

    Args:
        strategy: Any, without state on NVMe. Its timeout also limits the save's collectives.
    """

    def __init__(self, strategy: Strategy) -> None:
        device = strategy.root_device
        has_gpu = device.type == "cuda"  # memory can be pinned only for a GPU
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=has_gpu,
                use_non_blocking_copy=has_gpu,
                use_shared_memory=False,
                use_async_staging=False,
            )
        )
        # A thread starts on GPU 0; each rank's would take half a gigabyte there.
        choose = partial(torch.cuda.set_device, device) if has_gpu else None
        self._thread = ThreadPoolExecutor(1, "checkpoint", choose)
        self._save: Future[None] | None = None
        self._group: commit.Group = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timeout_of(strategy))

    def start(self, trainer: L.Trainer, path: Path) -> None:
        """Copies the present state, and starts to write it as `path`. Collective.

        Call `wait` before the next start.
        """
        assert self._save is None
        path = Path(weights.broadcast(str(path)))
        format, checkpoint = format_for(trainer.strategy), checkpoint_of(trainer)
        write = format.stage(checkpoint, self._stager.stage, self._group)
        entries = commit.training_entries(trainer)
        self._save = self._thread.submit(self._write, path, entries, write)

    def wait(self) -> None:
        """Waits until the checkpoint is committed. Collective.

        Raises:
            SaveError: on all ranks, if a disk refused a write of one of them.
        """
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def abandon(self) -> None:
        """Waits for the write after training has failed; its errors are ignored."""
        save, self._save = self._save, None
        if save is not None:
            save.exception()

    def close(self) -> None:
        """Frees memory, thread and process group."""
        self.abandon()
        self._thread.shutdown()
        self._stager.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _write(
        self, path: Path, entries: dict[str, object], write: Callable[[Path], object]
    ) -> None:
        """Runs in the thread, like commit.save. It must not start a collective of another group."""
        temporary = commit.begin(path, self._group)
        failure = commit.disk_error(lambda: write(temporary))
        commit.finish(path, entries, failure, self._group)
