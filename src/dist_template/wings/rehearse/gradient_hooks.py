"""Records by how much each hook between backward and optimizer step scales the gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from ...compat.deepspeed import is_partitioned_in_half
from ...compat.hooks import own
from ...compat.lightning import accumulates
from ...compat.torch import on_optimizer_step
from ...parallel import run_strategy
from ...weights import is_partitioned_by_zero
from . import code_locations
from .forward_hooks import full

HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
Factors = Mapping[str, tuple[float, str]]  # {hook: (factor, file:line)}


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Returns the unsharded gradient, or None if there is none. Collective."""
    if is_partitioned_by_zero(parameter) or is_partitioned_in_half(parameter):
        from deepspeed.utils import safe_get_full_grad  # DeepSpeed keeps it elsewhere than in .grad

        gradient = safe_get_full_grad(parameter)
    else:
        gradient = parameter.grad
    return None if gradient is None else full(gradient)


class GradientHooks(Callback):
    """Writes factors.pt: `Factors` in the order of execution; the last is the optimizer's step.

    They are those of the norm over all stages of a pipeline.

    Args:
        folder: Destination.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._factors: dict[str, tuple[float, str]] = {}
        self._norm = 0.0  # after the last hook

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for owner in [*trainer.callbacks, pl_module]:  # ty: ignore[missing-attribute]
            if type(owner).__module__.startswith(f"{__package__}."):
                continue
            base = Callback if isinstance(owner, Callback) else L.LightningModule
            for name in HOOKS:
                if hasattr(base, name) and (hook := own(owner, name, base)):
                    label = f"{type(owner).__name__}.{name}"
                    setattr(owner, name, self._measured(trainer, pl_module, hook, label))

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        optimizer: Any = trainer.optimizers[0]
        self._handle = on_optimizer_step(optimizer, lambda *_: self._at_step(trainer, pl_module))

    def _measured(self, trainer: Any, module: Any, hook: Any, label: str) -> Callable[..., Any]:
        @functools.wraps(hook)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if trainer.global_step or accumulates(trainer):
                return hook(*args, **kwargs)
            before = _norm(trainer, module)
            result = hook(*args, **kwargs)
            self._add(label, before, _norm(trainer, module), code_locations.of_function(hook))
            return result

        return measured

    def _at_step(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 0 and self._factors:
            self._add("the optimizer's step", self._norm, _norm(trainer, module), "")

    def _add(self, label: str, before: float, after: float, location: str) -> None:
        self._factors[label] = (after / before if before else 1.0, location)
        self._norm = after

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 1 and self._factors and trainer.is_global_zero:
            torch.save(self._factors, self.folder / "factors.pt")
            self._factors = {}


def _norm(trainer: Any, module: Any) -> float:
    """Returns the norm of all gradients over all ranks. Collective if they are sharded."""
    layers = run_strategy(trainer.strategy).layers
    if layers.group is not None:
        norm = layers.norm([*module.parameters()])
        return norm.item() if norm is not None else 0.0
    total = 0.0
    for parameter in module.parameters():
        gradient = gradient_of(parameter) if parameter.requires_grad else None
        if gradient is not None:
            total += gradient.double().pow(2).sum().item()
    return total**0.5


def first_other_factor(expected: Factors, got: Factors, tolerance: float) -> str:
    """Describes the first hook with another factor than expected; "" if there is none."""
    for hook, (factor, location) in got.items():
        expected_factor, _ = expected.get(hook, (1.0, ""))
        if abs(factor - expected_factor) > tolerance * expected_factor:
            where = f" ({location})" if location else ""
            return (
                f"{hook}{where} multiplies the gradients, which agree after backward, by"
                f" {factor:.4g} instead of {expected_factor:.4g}"
            )
    return ""
