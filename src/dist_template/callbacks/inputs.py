"""Whether what the model is fed is worth learning from, seen on the device in the batches of log steps."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor

from ..text.order import NOT_COUNTED
from .training_log import logs


class Inputs(Callback):
    """data/counted_share: labels that count, of all. data/distinct_token_share: distinct tokens of a micro-batch, of as
    many as there could be (its size, or the vocabulary's).

    Looks at the micro-batches of optimizer steps that end in a log step, and costs nothing in the others. A batch of
    your own without `labels` or `input_ids` has no such metric.
    """

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not isinstance(batch, dict) or not logs(trainer, trainer.global_step + 1):
            return
        if isinstance(labels := batch.get("labels"), Tensor):
            pl_module.metrics.add("data/counted_share", (labels != NOT_COUNTED).float().mean())
        if isinstance(tokens := batch.get("input_ids"), Tensor):
            size = getattr(trainer.datamodule, "vocab_size", 0)  # ty: ignore[missing-attribute]
            if size:
                share = distinct(tokens, size).sum() / min(size, tokens.numel())
                pl_module.metrics.add("data/distinct_token_share", share)


def distinct(tokens: Tensor, vocab_size: int) -> Tensor:
    """(vocab_size,) 1.0 where a token is among `tokens`. torch.unique would wait for the device to know how many."""
    seen = torch.zeros(vocab_size, device=tokens.device)
    return seen.index_fill_(0, tokens.reshape(-1).clamp(0, vocab_size - 1), 1.0)
