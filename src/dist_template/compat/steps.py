"""A hook of callbacks at the end of an optimizer step, which Lightning (2.6) has none for.

Its `on_train_batch_end` follows each micro-batch of an accumulation. Private: whether a micro-batch
ends without a step (compat/lightning.py:accumulates)."""

from typing import Any

import lightning as L

from ..run_callback import RunCallback
from .lightning import accumulates


class StepCallback(RunCallback):
    """A callback that acts when an optimizer step is complete: define `on_step_end`.

    The loop of `fit` (compat/loop.py) does not call it in the micro-batches before; in any other
    Trainer it asks in each."""

    def on_step_end(self, trainer: Any, pl_module: L.LightningModule, *batch: object) -> None:
        """Is called after the last micro-batch of a step, in the order of callbacks."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, *batch: object, **named: object
    ) -> None:
        if not accumulates(trainer):
            self.on_step_end(trainer, pl_module)
