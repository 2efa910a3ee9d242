"""Empties the metric buffer at log steps: one collective, one transfer, one call per logger."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor


def logs(trainer: Any, step: int) -> bool:
    """Whether the metrics of the optimizer step `step` are written."""
    return step % trainer.log_every_n_steps == 0 or step == trainer.estimated_stepping_batches


class TrainingLog(Callback):
    """Write the module's training metrics every `trainer.log_every_n_steps` optimizer steps.

    Callbacks that have to do with metrics define hooks, which are called on every rank, and at log steps alone:
    `before_log_step(trainer, module)` puts what was measured into `module.metrics`. In `on_log_step(trainer, module,
    metrics)` those that come before this one may add to `metrics` what follows from all ranks' values in
    `module.metrics.of_ranks`; those that come after it show them, or act upon them.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop._should_accumulate() or not logs(trainer, trainer.global_step):
            return
        callbacks: list[Any] = trainer.callbacks  # ty: ignore[missing-attribute]
        _tell(callbacks, "before_log_step", trainer, pl_module)
        metrics = pl_module.metrics.read(_sum_over_ranks, pl_module.device, trainer.global_rank, trainer.world_size)
        pl_module.derive(metrics)
        metrics["train/learning_rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        pl_module.metrics.latest = metrics
        place = callbacks.index(self)
        _tell(callbacks[:place], "on_log_step", trainer, pl_module, metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        _tell(callbacks[place:], "on_log_step", trainer, pl_module, metrics)


def _sum_over_ranks(vector: Tensor) -> Tensor:
    """Not by Lightning's `strategy.reduce`, which waits at a barrier first (2.6.6)."""
    if dist.is_initialized():
        dist.all_reduce(vector)
    return vector


def _tell(callbacks: list[Any], hook: str, *args: Any) -> None:
    for callback in callbacks:
        if hasattr(callback, hook):
            getattr(callback, hook)(*args)
