"""Warns about trainable parameters that get no gradient; DDP refuses them."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch import Callback

from ..compat.lightning import accumulates, needs_every_gradient
from ..errors import InputError
from ..parallel import run_strategy
from .console import write_lines

MAX_NAMES = 5  # in the warning


class UnusedParameters(Callback):
    """In the first optimizer step, names the trainable parameters without a gradient, on rank 0.

    It checks whether a gradient exists and reads no values. Later steps cost only the call. DDP
    does not reduce gradients that share a bucket with such a parameter: every rank refuses it.
    """

    _checks = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._needs_all = needs_every_gradient(trainer.strategy)
        self._checks = trainer.is_global_zero or self._needs_all
        self._reached: set[str] = set()
        self._hooks: list[Any] = []
        if not self._checks or not run_strategy(trainer.strategy).frees_gradients:
            return
        # DeepSpeed frees gradients during the backward pass.
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad:
                add = partial(self._add, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(add))

    def _add(self, name: str, parameter: Any) -> None:
        self._reached.add(name)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if not self._checks or accumulates(trainer):
            return
        self._checks = False
        for hook in self._hooks:
            hook.remove()
        unused = []
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad and parameter.grad is None and name not in self._reached:
                unused.append(name)
        if unused:
            more = f" and {len(unused) - MAX_NAMES} more" if len(unused) > MAX_NAMES else ""
            what = f"no gradient in the first step: {', '.join(unused[:MAX_NAMES])}{more}"
            if self._needs_all and trainer.world_size > 1:
                cure = "trainer.strategy ddp_find_unused_parameters_true allows them"
                raise InputError(f"{what}. DDP needs one of each trainable parameter: {cure}")
            advice = "use them in forward, or freeze them with requires_grad_(False)"
            write_lines(trainer, f"warning: {what}. They are not trained: {advice}")
