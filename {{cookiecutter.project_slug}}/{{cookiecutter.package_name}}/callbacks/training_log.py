"""Empties the metric buffer at log steps: one collective, one transfer, one call per logger."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch import Callback


def is_log_step(trainer: Any) -> bool:
    """Whether the optimizer step just done is one whose metrics are written."""
    step = trainer.global_step
    return step % trainer.log_every_n_steps == 0 or step == trainer.estimated_stepping_batches


class TrainingLog(Callback):
    """Write the module's training metrics every `trainer.log_every_n_steps` optimizer steps.

    Callbacks that have to do with metrics define `on_log_step(trainer, module, metrics)`; it is called on every rank.
    Those that come before this one have put what they measured into `module.metrics`, and may add to `metrics` what
    follows from all ranks' values in `module.metrics.of_ranks`. Those that come after it show them, or act upon them.
    """

    _written_step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._written_step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._written_step or not is_log_step(trainer):
            return
        self._written_step = step
        metrics = pl_module.metrics.read(trainer.strategy.all_gather)
        pl_module.derive(metrics)
        metrics["train/learning_rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        pl_module.metrics.latest = metrics
        callbacks: list[Any] = trainer.callbacks  # ty: ignore[missing-attribute]
        place = callbacks.index(self)
        _tell(callbacks[:place], trainer, pl_module, metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        _tell(callbacks[place:], trainer, pl_module, metrics)


def _tell(callbacks: list[Any], trainer: Any, module: Any, metrics: dict[str, float]) -> None:
    for callback in callbacks:
        if hasattr(callback, "on_log_step"):
            callback.on_log_step(trainer, module, metrics)
