"""Freezes long-lived objects (gc.freeze), so that Python's garbage collections stay short."""

from __future__ import annotations

import gc
from typing import Any

from lightning.pytorch import Callback

AFTER_STEPS = 50  # by then all modules are imported, and the model and optimizer state are built


class Garbage(Callback):
    """Collects once and freezes what remains: modules, the model, the optimizer state.

    With torch, Lightning and transformers that is a million objects. A full collection of them
    takes a third of a second, in a step of one rank that all others wait for.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._batches = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        self._batches += 1
        if self._batches == AFTER_STEPS * trainer.accumulate_grad_batches:
            gc.collect()
            gc.freeze()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        gc.unfreeze()  # a later training in this process must be able to free this model
