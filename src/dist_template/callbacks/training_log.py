"""Writes metrics at log steps: one collective, one device transfer, one call per logger."""

from typing import Any

import lightning as L
import torch.distributed as dist
from torch import Tensor

from ..compat.lightning import has_passed, last_step, log_at_optimizer_steps
from ..compat.steps import StepCallback
from ..model.any_module import metrics_of, tracks_metrics
from ..parallel import rank_view
from ..run_callback import run_callbacks


def logs(trainer: Any, step: int) -> bool:
    """Returns whether optimizer step `step` is a log step."""
    return step % trainer.log_every_n_steps == 0 or step == trainer.estimated_stepping_batches


class TrainingLog(StepCallback):
    """Writes the module's training metrics every `trainer.log_every_n_steps` optimizer steps.

    It calls the hooks of every RunCallback, on every rank and at log steps only."""

    def __init__(self) -> None:
        self._rate: float | Tensor | None = None  # with which the newest optimizer step was made

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        log_at_optimizer_steps(trainer)

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        if not tracks_metrics(pl_module):  # Lightning has divided it by the accumulation
            loss = loss.detach() * trainer.accumulate_grad_batches
            metrics_of(pl_module).add("train/loss", loss)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        """Keeps the step's learning rate: at the end of the batch, the schedule has set the next
        step's already. A rate that is a tensor is changed in place."""
        if optimizer is trainer.optimizers[0] and optimizer.param_groups:
            rate = optimizer.param_groups[0]["lr"]
            self._rate = rate.detach().clone() if isinstance(rate, Tensor) else rate

    def on_step_end(self, trainer: Any, pl_module: L.LightningModule, *_: object) -> None:
        if not has_passed(trainer, 1):
            return
        is_last = trainer.global_step == last_step(trainer, pl_module)
        if not is_last and not has_passed(trainer, trainer.log_every_n_steps):
            return
        callbacks, buffer = run_callbacks(trainer), metrics_of(pl_module)
        for callback in callbacks:
            callback.before_log_step(trainer, pl_module)
        rank, ranks = trainer.global_rank, trainer.world_size
        agree = rank_view(trainer.strategy).layers.all_names
        metrics = buffer.read(_sum_over_ranks, pl_module.device, rank, ranks, agree)
        derive = getattr(pl_module, "derive", None)
        if tracks_metrics(pl_module) and callable(derive):
            derive(metrics)
        if self._rate is not None:  # None: the module steps no optimizer of Lightning's
            metrics["train/learning_rate"] = float(self._rate)
        buffer.latest = metrics
        for callback in callbacks:
            callback.add_metrics(trainer, pl_module, metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        for callback in callbacks:
            callback.on_log_step(trainer, pl_module, metrics)


def _sum_over_ranks(vector: Tensor) -> Tensor:
    """Sums without Lightning's `strategy.reduce`, which waits at a barrier first (2.6.6)."""
    if dist.is_initialized():
        dist.all_reduce(vector)
    return vector
