"""Freezes long-lived objects (gc.freeze), so that Python's garbage collections stay short."""

import gc

import lightning as L
from lightning.pytorch import Callback

AFTER_STEPS = 50  # by then all modules are imported, and the model and optimizer state are built


class Garbage(Callback):
    """Collects once and freezes what remains: modules, the model, the optimizer state.

    With torch, Lightning and transformers that is a million objects. A full collection of them
    takes a third of a second, in a step of one rank that all others wait for.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._batches = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object, **__: object) -> None:
        self._batches += 1
        if self._batches == AFTER_STEPS * trainer.accumulate_grad_batches:
            gc.collect()
            gc.freeze()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        gc.unfreeze()  # a later training in this process must be able to free this model
