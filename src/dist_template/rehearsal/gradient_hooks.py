"""Records how each hook between backward and the optimizer step scales the gradients of the first step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback

from ..compat.hooks import own
from ..compat.lightning import accumulates
from ..compat.torch import on_optimizer_step
from . import code_locations
from .first_step import gradient_of

HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
STEP = "the optimizer's step"
Stage = dict[str, Any]  # hook, location, before, after: the gradient norm


class GradientHooks(Callback):
    """Writes stages.pt: a list of `Stage` in the order in which the hooks ran; the last is the optimizer step.

    Args:
        folder: Destination.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stages: list[Stage] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for owner in [*trainer.callbacks, pl_module]:  # ty: ignore[missing-attribute]
            base = Callback if isinstance(owner, Callback) else L.LightningModule
            for name in HOOKS:
                if not type(owner).__module__.startswith(f"{__package__}.") and (hook := _hook(owner, name, base)):
                    setattr(owner, name, self._measured(trainer, pl_module, hook, f"{type(owner).__name__}.{name}"))

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        optimizer: Any = trainer.optimizers[0]
        self._handle = on_optimizer_step(optimizer, lambda *_: self._at_step(trainer, pl_module))

    def _measured(self, trainer: Any, module: Any, hook: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(hook)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if trainer.global_step or accumulates(trainer):
                return hook(*args, **kwargs)
            before = _norm(module)
            result = hook(*args, **kwargs)
            self.stages.append(
                {"hook": label, "location": code_locations.of_function(hook), "before": before, "after": _norm(module)}
            )
            return result

        return measured

    def _at_step(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 0 and self.stages:
            before, after = self.stages[-1]["after"], _norm(module)
            self.stages.append({"hook": STEP, "location": "", "before": before, "after": after})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and self.stages and trainer.is_global_zero:
            torch.save(self.stages, self.folder / "stages.pt")
            self.stages = []


def _hook(owner: Any, name: str, base: type) -> Any:
    return own(owner, name, base) if hasattr(base, name) else None


def _norm(module: Any) -> float:
    """Returns the norm of all gradients over all ranks. Collective if they are sharded."""
    gradients = [gradient_of(parameter) for parameter in module.parameters() if parameter.requires_grad]
    return sum(gradient.double().pow(2).sum().item() for gradient in gradients if gradient is not None) ** 0.5


def first_other_factor(expected: Sequence[Stage], got: Sequence[Stage], tolerance: float) -> str:
    """Names the first hook that scales the gradients by another factor in `got` than in `expected`; "" if none does."""
    known: Mapping[str, Stage] = {stage["hook"]: stage for stage in expected}
    for stage in got:
        other = known.get(stage["hook"])
        factor, expected_factor = _factor(stage), _factor(other) if other else 1.0
        if abs(factor - expected_factor) > tolerance * expected_factor:
            where = f" ({stage['location']})" if stage["location"] else ""
            return (
                f"{stage['hook']}{where} multiplies the gradients, which agree after backward, by {factor:.4g} instead"
                f" of {expected_factor:.4g}"
            )
    return ""


def _factor(stage: Stage) -> float:
    return stage["after"] / stage["before"] if stage["before"] else 1.0
