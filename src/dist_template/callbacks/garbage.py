"""Keeps Python's garbage collector from what stays for good."""

from __future__ import annotations

import gc
from typing import Any

import lightning as L
from lightning.pytorch import Callback

AFTER_STEPS = 50  # what is imported, built and compiled once is there by then


class Garbage(Callback):
    """Collect once, and let later collections pass over what is left: modules, the model, the optimizer's state.

    With torch, Lightning and transformers that is a million objects, through which a full collection takes a third of a
    second, in a step of one rank that all others wait for. What comes later is collected as ever: no cycle in your own
    code can fill the memory, as it would with the collector off.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._batches = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        if self._batches == AFTER_STEPS * trainer.accumulate_grad_batches:
            gc.collect()
            gc.freeze()

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        gc.unfreeze()  # a process may train again: this model must be freed
