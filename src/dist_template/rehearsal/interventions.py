"""Callbacks that change a training of a rehearsal: kill it, keep one of its checkpoints, make its labels ragged."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor

from ..callbacks.checkpoint import LastCheckpoint
from ..checkpoint import manifest

NOT_COUNTED = -100
MAX_MASKED_SHARE = 0.8


class RaggedLabels(Callback):
    """Masks a different share of the labels in each row, from none to most of them.

    With full rows, a loss that is averaged per rank instead of over the tokens of the global batch would be correct by
    accident. The mask depends on the row alone, so it is the same on any number of ranks.
    """

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        data: Any = trainer.datamodule  # ty: ignore[missing-attribute]
        for name in ("train_dataloader", "val_dataloader"):
            setattr(data, name, _with_ragged_batches(getattr(data, name)))


def _with_ragged_batches(make_loader: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        loader = make_loader()
        if hasattr(loader, "collate_fn"):
            loader.collate_fn = _Ragged(loader.collate_fn)
        return loader

    return make


class _Ragged:
    """A collate function that can be pickled for a loader's worker process, unlike a closure."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        if isinstance(batch, dict) and isinstance(batch.get("labels"), Tensor) and batch["labels"].ndim == 2:
            batch["labels"] = torch.stack([_masked(row) for row in batch["labels"]])
        return batch


def _masked(labels: Tensor) -> Tensor:
    """Returns (T,) labels with a random share set to NOT_COUNTED."""
    draw = np.random.default_rng(np.abs(labels.numpy()))
    share = draw.uniform(0, MAX_MASKED_SHARE)
    masked = torch.from_numpy(draw.random(len(labels)) < share)
    masked[0] = False  # a micro-batch without any label has no loss
    return labels.masked_fill(masked, NOT_COUNTED)


class KillAt(Callback):
    """Kills every rank with SIGKILL after `step` optimizer steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step >= self.step:
            trainer.strategy.barrier()  # until all ranks are here and all checkpoints are written
            os.kill(os.getpid(), signal.SIGKILL)


class KeepCheckpoint(Callback):
    """Copies the checkpoint that was written after `step`, before newer ones replace it.

    Args:
        step: Optimizer step of the checkpoint.
        path: Destination.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        self._is_done = False

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Runs at the next step: Lightning calls checkpoint callbacks last, so that the file exists only then."""
        if trainer.global_step != self.step or self._is_done:
            return
        self._is_done = True
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            (saver,) = (c for c in trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint))
            shutil.copytree(saver.folder / manifest.name(self.step), self.path)
        trainer.strategy.barrier()
