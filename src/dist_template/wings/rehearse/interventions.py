"""Callbacks that change a training: kill all ranks, mask labels."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor

from ...model.any_module import owns_order

NOT_COUNTED = -100
MAX_MASKED_SHARE = 0.8


class RaggedLabels(Callback):
    """Masks a different share of the labels in each row, from none to most of them.

    With full rows, a loss that is averaged per rank instead of over the tokens of the global batch
    would be correct by accident. The mask depends on the row alone, not on the number of ranks.
    """

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        data: Any = trainer.datamodule  # ty: ignore[missing-attribute]
        if owns_order(data):  # a data module of texts; another's `transform` may mean anything
            transform = data.transform

            @functools.wraps(transform)
            def masked(batch: dict[str, Any]) -> dict[str, Any]:
                return _with_ragged_labels(transform(batch))

            data.transform = masked


def _with_ragged_labels(batch: dict[str, Any]) -> dict[str, Any]:
    labels: Tensor = batch["labels"].clone()
    for row in labels:
        draw = np.random.default_rng(np.abs(row.numpy()))
        share = draw.uniform(0, MAX_MASKED_SHARE)
        masked = torch.from_numpy(draw.random(len(row)) < share)
        masked[0] = False  # a micro-batch without any label has no loss
        row[masked] = NOT_COUNTED
    return batch | {"labels": labels}


class KillAt(Callback):
    """Kills every rank with SIGKILL after `step` optimizer steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step >= self.step:
            trainer.strategy.barrier()  # until all checkpoints are written
            os.kill(os.getpid(), signal.SIGKILL)
