"""The first step, looked at closely: so that a difference in the loss can be traced to where it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..parallel.weights import is_partitioned_by_zero


class Details(Callback):
    """Write down the first forward pass, the first gradients and, at the end, what the trained module answers.

    forward.pt    {module: output} in the order in which modules end, of rank 0's first micro-batch
    gradients.pt  {parameter: whole gradient} before clipping
    logits.pt     (batch, logits) of the trained module on rank 0

    An error in the first forward pass is given the name of the module that it came from.

    Args:
        folder: Where to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._outputs: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self._inside: list[str] = []  # modules whose forward has begun and not ended, the innermost last
        self._batch: Any = None
        self._has_gradients = False

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for name, module in pl_module.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda _m, _i, name=name: self._inside.append(name)))
            self._hooks.append(module.register_forward_hook(lambda _m, _i, out, name=name: self._note(name, out)))

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        if self._inside and self._hooks:
            exception.add_note(f"in the forward pass of {self._inside[-1] or 'the module'}")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._batch is None:
            self._batch = batch

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            gradients = {name: _whole_gradient(p) for name, p in pl_module.named_parameters()}
            self._save(trainer, "gradients", {name: g for name, g in gradients.items() if g is not None})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._save(trainer, "forward", self._outputs)

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.eval()
        logits = pl_module(self._batch)
        pl_module.train()
        if isinstance(logits, Tensor):  # a module with another `forward` is not compared
            self._save(trainer, "logits", (self._batch, _whole(logits)))

    def _note(self, name: str, output: Any) -> None:
        while self._inside and self._inside.pop() != name:
            pass  # recomputation stops as soon as it has what it needs, in the middle of a module
        first = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", output)
        if isinstance(first, Tensor) and name not in self._outputs:  # recomputation comes by again
            self._outputs[name] = _whole(first)

    def _save(self, trainer: L.Trainer, name: str, value: Any) -> None:
        if trainer.is_global_zero:
            torch.save(value, self.folder / f"{name}.pt")


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def _whole_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Over all ranks; None where there is none. Collective."""
    if is_partitioned_by_zero(parameter) or hasattr(parameter, "_hp_mapping"):  # DeepSpeed's: partitioned, not in .grad
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
    else:
        gradient = parameter.grad
    return None if gradient is None else _whole(gradient)
