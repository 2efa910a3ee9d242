"""Balances a mixture of experts after each optimizer step, and measures the load of its experts."""

from typing import Any

import lightning as L
from torch import Tensor

from ..compat.lightning import accumulates
from ..compat.steps import StepCallback
from ..errors import InputError
from ..model.any_module import metrics_of, typed_attribute, value_now
from ..model.balance import BalanceConfig, Balancer
from .numerics import Numerics
from .training_log import logs

SPEED = "model.balance.bias_update_speed"
LOADS = "moe/loads"  # tokens of each expert, in the metric buffer


def refuse_without_experts(config: BalanceConfig, module: L.LightningModule) -> None:
    """Raises InputError if balancing is configured for a network that has no experts. That of a
    language model is known before: cli/limits/unread.py; files for several models set it there."""
    changed = [f"model.balance.{name}" for name in config.changed()]
    if changed and not getattr(module, "counts_tokens", False):
        verb = "has" if len(changed) == 1 else "have"
        raise InputError(
            f"{', '.join(changed)} {verb} no effect: {type(module).__name__} has no experts; remove"
            " the key"
        )


class Experts(StepCallback):
    """Logs the load of the experts and balances their routers (balance.py) after each step.

    moe/expert_load_max_over_mean, of the least even layer, and moe/unused_experts are over all
    micro-batches and ranks of the optimizer step that is logged. Routing is read from the calls of
    the experts, on the device, before expert parallelism sends tokens to other ranks. Supports the
    experts of transformers 5 (stacked tensors, called with the indices of the chosen experts),
    which drop no token; others have no moe/*.

    Balancing needs the loads of every optimizer step: one all-reduce, started before the last
    micro-batch's backward pass and waited for after the optimizer step. Without balancing, only log
    steps are counted, and the first micro-batch, so that a compiled block is compiled with and
    without counting in the first two steps."""

    def __init__(self) -> None:
        self._is_on = False
        self._handles: list[Any] = []  # none in a pipeline's stage without experts
        self._saved: Tensor | None = None  # (L, E) shares of the load, from a checkpoint

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        balancer = typed_attribute(pl_module, "balancer", Balancer)
        if balancer is None:
            balancer = Balancer(pl_module, BalanceConfig())
        if not balancer.layers:
            refuse_without_experts(balancer.config, pl_module)
            return
        self._balancer, self._is_first, self._is_on = balancer, True, True
        self._handles = balancer.attach(pl_module.device)
        callbacks: list[Any] = getattr(trainer, "callbacks", [])
        self._numerics = next((each for each in callbacks if isinstance(each, Numerics)), None)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._is_on or self._saved is None:
            return
        if self._saved.shape == self._balancer.shares.shape:
            self._balancer.shares.copy_(self._saved)

    def on_train_batch_start(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if self._is_on:
            is_logged = logs(trainer, trainer.global_step + 1)
            self._balancer.counts_now = self._balancer.needs_loads or self._is_first or is_logged
            self._is_first = False

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        if self._is_on:
            self._balancer.counts_now = False  # a checkpointed block runs again in backward
            if self._balancer.needs_loads and not accumulates(trainer):
                given = self._balancer.config.bias_update_speed
                self._balancer.bias_update_speed = value_now(pl_module, SPEED, given)
                self._balancer.begin_reduction()

    def on_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        if self._is_on:
            if logs(trainer, trainer.global_step):
                metrics_of(pl_module).put_counts(LOADS, self._balancer.loads.flatten().clone())
            if self._balancer.needs_loads:
                skipped = None if self._numerics is None else self._numerics.skipped
                self._balancer.finish_step(skipped)
            self._balancer.loads.zero_()

    def add_metrics(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]
    ) -> None:
        if not self._is_on:
            return
        totals, width = metrics_of(module).totals[LOADS], self._balancer.loads.shape[1]
        worst, unused = 0.0, 0
        for i, layer in enumerate(self._balancer.layers):
            loads = totals[i * width : i * width + layer.num_experts]
            worst = max(worst, max(loads) / max(sum(loads), 1.0) * layer.num_experts)
            unused += loads.count(0.0)
        metrics["moe/expert_load_max_over_mean"] = worst
        metrics["moe/unused_experts"] = unused
        if isinstance(self._balancer.config.bias_update_speed, list):
            metrics["moe/bias_update_speed"] = self._balancer.bias_update_speed

    def state_dict(self) -> dict[str, Any]:
        if self._is_on and self._balancer.needs_shares:
            return {"shares": self._balancer.shares.cpu()}
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("shares")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._is_on = [], False
