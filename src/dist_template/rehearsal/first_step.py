"""Records outputs and gradients of the first step, so that a difference in the loss can be traced to its cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from ..compat.deepspeed import is_partitioned_in_half
from ..compat.lightning import accumulates
from ..weights import is_partitioned_by_zero
from . import code_locations
from .forward_hooks import ForwardCall, ForwardHooks, full, locate_modules
from .recorder import fingerprint, samples_in


class Details(Callback):
    """Saves forward passes and gradients of the first step and, at the end, the trained module's logits.

    forward<rank>.pt   per micro-batch of the first step: rows (a hash of each), tensors (see `ForwardHooks`)
    places.pt          {module: class and file:line}, also of training_step, forward, datamodule, optimizer, order
    draws.pt           {module: "dropout", or another use of the random generator in its forward pass}
    gradients.pt       {parameter: unsharded gradient} after the first backward pass, before clipping
    buffers.pt         {buffer: value} after the first step, on rank 0
    missing.pt         {parameter that never gets a gradient: whether the forward of its module ran}
    logits.pt          (batch, logits) of the trained module on rank 0

    An error in the first forward pass gets a note with the name of its module.

    Args:
        folder: Destination.
        dropout_is_off: Replaces torch's dropout functions by the identity, because random masks differ between ranks.
    """

    def __init__(self, folder: Path, dropout_is_off: bool = False) -> None:
        self.folder = folder
        self.dropout_is_off = dropout_is_off
        self._hooks: _Draws | None = None
        self._passes: list[dict[str, Any]] = []
        self._batch: Any = None
        self._missing: dict[str, bool] = {}

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self.dropout_is_off:
            _turn_dropout_off(lambda: self._hooks.note("dropout") if self._hooks else None)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._hooks, self._call = _Draws(pl_module), ForwardCall(pl_module)
        places = locate_modules(pl_module) | {
            "training_step": code_locations.of_function(pl_module.training_step),
            "forward": code_locations.of_function(pl_module.forward),
            "datamodule": code_locations.of_class(type(trainer.datamodule)),  # ty: ignore[missing-attribute]
            "optimizer": code_locations.of_class(type(trainer.optimizers[0])),
            "order": code_locations.of_class(type(getattr(trainer.train_dataloader, "batch_sampler", None))),
        }
        self._save(trainer, "places", places)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        if self._hooks and self._hooks.inside:
            exception.add_note(f"in the forward pass of {self._hooks.inside[-1] or 'the module'}")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch = batch if self._batch is None else self._batch
        if self._hooks:
            self._hooks.begin()
            rows = [fingerprint(sample) for sample in samples_in(batch)]
            self._passes.append({"rows": rows, "tensors": self._hooks.tensors})

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        if self._hooks:
            self._hooks.changed()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        trained = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        if self._hooks:
            gradients = {name: gradient_of(parameter) for name, parameter in trained.items()}
            self._save(trainer, "gradients", {name: g for name, g in gradients.items() if g is not None})
            self._missing = {name: self._has_run(name) for name, gradient in gradients.items() if gradient is None}
        self._missing = {name: ran for name, ran in self._missing.items() if trained[name].grad is None}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._hooks and trainer.global_step and not accumulates(trainer):
            self._hooks.remove()
            torch.save(self._passes, self.folder / f"forward{trainer.global_rank}.pt")
            self._save(trainer, "draws", self._hooks.draws)
            self._save(trainer, "buffers", {name: full(buffer) for name, buffer in pl_module.named_buffers()})
            self._hooks = None

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._save(trainer, "missing", self._missing)
        pl_module.eval()
        logits = self._call.repeat(pl_module)
        pl_module.train()
        if isinstance(logits, Tensor):  # other outputs of `forward` are not compared
            self._save(trainer, "logits", (self._batch, full(logits)))

    def _has_run(self, parameter: str) -> bool:
        """Returns whether the forward of the module that owns `parameter` ran in the first step."""
        owner = parameter.rpartition(".")[0]
        return any(owner in each["tensors"] for each in self._passes)

    def _save(self, trainer: L.Trainer, name: str, value: Any) -> None:
        if trainer.is_global_zero:
            torch.save(value, self.folder / f"{name}.pt")


class _Draws(ForwardHooks):
    """Also records which modules advance the random generator in their own code, as {module: what}."""

    def __init__(self, root: nn.Module) -> None:
        self.draws: dict[str, str] = {}
        super().__init__(root)

    def begin(self) -> None:
        """Called at the start of a micro-batch."""
        self.tensors, self.inside = {}, []
        self._state = torch.get_rng_state()

    def note(self, what: str) -> None:
        self.draws.setdefault(self.inside[-1] if self.inside else "training_step", what)

    def changed(self) -> None:
        state = torch.get_rng_state()
        if not torch.equal(state, self._state):
            self._state = state
            self.note("another random number")


def _turn_dropout_off(note: Any) -> None:
    """Replaces torch's dropout functions in this process, which runs one training."""
    functional: Any = torch.nn.functional
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):

        def identity(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if training and p:
                note()
            return input

        setattr(functional, name, identity)
    attention = functional.scaled_dot_product_attention

    def without_dropout(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kw: Any
    ) -> Tensor:
        if dropout_p:
            note()
        return attention(query, key, value, attn_mask, 0.0, *args, **kw)

    functional.scaled_dot_product_attention = without_dropout


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Returns the unsharded gradient, or None if there is none. Collective."""
    if is_partitioned_by_zero(parameter) or is_partitioned_in_half(parameter):  # DeepSpeed's, not in .grad
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
    else:
        gradient = parameter.grad
    return None if gradient is None else full(gradient)
