"""Finds trainable parameters that get no gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from torch import nn

from ..compat.lightning import accumulates
from .console import write_lines

MOST = 5  # names in the warning


class UnusedParameters(Callback):
    """Warns once about trainable parameters without a gradient in the first optimizer step, on rank 0.

    It checks on the host whether a gradient exists, and reads none. Later steps cost only the call.
    """

    def __init__(self) -> None:
        self._waits = False
        self._reached: set[str] = set()
        self._handles: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._waits = trainer.is_global_zero
        if self._waits and hasattr(trainer.strategy, "deepspeed_engine"):  # it frees gradients in backward
            for name, parameter in _trainable(pl_module).items():
                reached = partial(lambda name, _: self._reached.add(name), name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(reached))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if not self._waits or accumulates(trainer):
            return
        self._waits = False
        parameters = _trainable(pl_module)
        unused = [name for name, p in parameters.items() if p.grad is None and name not in self._reached]
        self.teardown()
        if unused:
            more = f" and {len(unused) - MOST} more" if len(unused) > MOST else ""
            names = f"{', '.join(unused[:MOST])}{more}"
            advice = "They are not trained: use them in forward, or freeze them with requires_grad_(False)"
            write_lines(trainer, f"warning: no gradient in the first step: {names}. {advice}")

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
