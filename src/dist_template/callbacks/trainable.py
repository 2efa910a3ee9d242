"""Freezing and unfreezing in a training: `requires_grad` that a hook or a callback changes.

DDP reduces the gradients of the parameters that were trainable when it wrapped the module: each
rank would train one that is unfrozen later by its own gradients, and one that is frozen ends the
next step with an error. Here the module is wrapped again. DeepSpeed's engine partitions its
optimizer at the start, so such a change is refused. FSDP2 needs nothing.

A checkpoint has the names of the parameters that were frozen or unfrozen since the start, so that a
resumed training has them as they were, whether or not the hook runs again."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn

from ..checkpoint.frozen import CHANGED, restore_trainable
from ..compat.lightning import after_training, before_training_step
from ..parallel import rank_view
from ..parallel.rank_view import RankView


class Trainable(Callback):
    """Keeps the strategy and checkpoints in step with the module's `requires_grad`."""

    def __init__(self) -> None:
        self._initial: dict[str, bool] | None = None  # before training, by name
        self._names: list[str] = []
        self._parameters: list[Any] = []
        self._known: list[bool] = []  # by the strategy

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._initial = None

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._keep_initial(pl_module)
            restore_trainable(pl_module, checkpoint)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        before = {} if self._initial is None else self._initial
        changed = {}
        for name, value in _flags(pl_module).items():
            if before.get(name, value) != value:
                changed[name] = value
        checkpoint[CHANGED] = changed

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Runs after the strategy has prepared the module, in some before a checkpoint is
        loaded."""
        self._keep_initial(pl_module)
        named = dict(pl_module.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        self._known = [parameter.requires_grad for parameter in self._parameters]
        strategy = rank_view(trainer.strategy)
        if strategy.keeps_trainable:
            before_training_step(trainer.strategy, lambda: self._compare(strategy))

    def _keep_initial(self, module: L.LightningModule) -> None:
        """Keeps the flags before the first change of this training."""
        if not self._initial:
            self._initial = _flags(module)

    def _compare(self, strategy: RankView) -> None:
        """Tells the strategy what a hook or a callback has changed; before each training step."""
        now = [parameter.requires_grad for parameter in self._parameters]
        if now == self._known:
            return
        changed = {}
        for name, before, after in zip(self._names, self._known, now, strict=True):
            if before != after:
                changed[name] = after
        self._known = now
        strategy.change_trainable(changed)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        after_training(trainer.strategy)


def _flags(module: L.LightningModule) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}
