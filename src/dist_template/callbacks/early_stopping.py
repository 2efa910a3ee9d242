"""Early stopping by the validation loss of any module: Lightning's, which finds its monitor."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

from ..errors import InputError
from ..model.any_module import validation_loss


class StopEarly(EarlyStopping):
    """Stops training when a metric of the validation has stopped improving.

    Args:
        monitor: The metric. null: eval/loss, or what the module calls its validation loss
            (val_loss, valid/loss, …).
        patience: Validations without an improvement after which training stops.
        min_delta: A smaller change is no improvement.
        mode: Whether the lowest ("min") or the highest ("max") is best."""

    def __init__(
        self,
        monitor: str | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if monitor is None:
            monitor = ""
        # Lightning's check at the end of a training epoch comes before the validation is known.
        super().__init__(monitor, min_delta, patience, mode=mode, check_on_train_epoch_end=False)

    @property
    def state_key(self) -> str:
        """A key without the monitor, which is not known yet when a checkpoint is loaded."""
        return type(self).__qualname__

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        measured: Any = trainer.callback_metrics
        if not self.monitor:
            self.monitor = validation_loss(measured)
        if self.monitor not in measured:  # in the first validation, before training if there is one
            known = ", ".join(sorted(measured)) if measured else "nothing"
            what = f"monitor is {self.monitor!r}, which" if self.monitor else "the validation loss"
            raise InputError(
                f"StopEarly: {what} is not measured; give its monitor one of: {known}"
                " (--trainer.callbacks.monitor NAME after the preset)"
            )
        super().on_validation_end(trainer, pl_module)
