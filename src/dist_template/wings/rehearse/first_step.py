"""Callback: records the first optimizer step, to find what makes losses differ.

In the order of a step:

1. micro-batch   hashes of its rows and labels; a parameter that changed since the last micro-batch
2. forward       input and output of every module; which modules draw random numbers
3. backward      the norm of all gradients, before and after each hook that could scale them
4. gradients     each of them, unsharded, before clipping
5. end           buffers; after the training, what the trained module computes and never used
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from ...compat.deepspeed import gradient_of
from ...compat.lightning import accumulates
from ...compat.randomness import turn_dropout_off
from ...parallel import run_strategy
from ...parallel.pipeline.division import RemoteModule
from ...parallel.run_strategy import Layers
from ...weights import from_all_ranks
from . import code_locations
from .forward_hooks import ForwardCall, ForwardHooks, full
from .record import ForwardPass
from .recorder import fingerprint, labels_in, samples_in

METHODS = ("training_step", "forward", "validation_step", "build_model", "configure_model")
METHODS += ("configure_optimizers",)
SCALING_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


class FirstStep(Callback):
    """Records forward passes and gradients of the first step, and the trained model's logits.

    forward<rank>.pt   a `ForwardPass` for each micro-batch
    places.pt          {module: class and file:line}; also of METHODS, transform, datamodule,
                       optimizer, order
    draws.pt           {module: "dropout", or another use of the random generator in its forward}
    factors.pt         {hook: (factor by which it scales the gradients, file:line)}, as executed
    gradients.pt       {parameter: unsharded gradient} after the first backward, before clipping
    buffers.pt         {buffer: value} after the first step
    untied.pt          names of an embedding and a head that the architecture ties and that are two
    dropout.pt         where an evaluation drops out, file:line of the user's code, or ""
    missing.pt         {parameter that never gets a gradient: whether its module's forward ran}
    logits.pt          (batch, logits) of the trained module

    Rank 0 writes all but the first, in a pipeline with the entries of all stages.
    `dropout_is_off` replaces dropout by the identity, because random masks differ between ranks.
    """

    def __init__(self, folder: Path, dropout_is_off: bool = False) -> None:
        self.folder = folder
        self.dropout_is_off = dropout_is_off
        self._hooks: _StepHooks | None = None  # until the first step has ended
        self._batch: object = None
        self._weights: dict[str, str] = {}  # hashes, before the last micro-batch
        self._factors: dict[str, tuple[float, str]] = {}
        self._missing: dict[str, bool] = {}
        self._evaluation_dropout = ""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer, self._module = trainer, pl_module

        def note() -> None:
            if trainer.evaluating and not self._evaluation_dropout:
                self._evaluation_dropout = code_locations.of_caller() or "a callback"
            if self._hooks:
                self._hooks.note("dropout")

        if self.dropout_is_off:
            turn_dropout_off(note)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for owner in [*trainer.callbacks, pl_module]:  # ty: ignore[missing-attribute]
            if type(owner).__module__.startswith(f"{__package__}."):
                continue
            base = Callback if isinstance(owner, Callback) else L.LightningModule
            for name in SCALING_HOOKS:
                if hasattr(base, name) and is_overridden(name, owner, base):
                    label = f"{type(owner).__name__}.{name}"
                    setattr(owner, name, self._measured(getattr(owner, name), label))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        layers = run_strategy(trainer.strategy).layers
        self._group = layers.group
        self._hooks = _StepHooks(pl_module, layers)
        self._call = ForwardCall(pl_module)

        places: dict[str, str] = {}
        for name, module in pl_module.named_modules():
            if not isinstance(module, RemoteModule):
                places[name] = code_locations.of_module(module)
        for name in METHODS:
            if hasattr(pl_module, name):
                places[name] = code_locations.of_function(getattr(pl_module, name))
        data = trainer.datamodule  # ty: ignore[missing-attribute]
        places["transform"] = code_locations.of_function(getattr(data, "transform", None))
        places["datamodule"] = code_locations.of_class(type(data))
        places["optimizer"] = code_locations.of_class(type(trainer.optimizers[0]))
        order = getattr(trainer.train_dataloader, "batch_sampler", None)
        places["order"] = code_locations.of_class(type(order))
        self._save("places", places)

    # ---- the first step ----------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self._batch is None:
            self._batch = batch
        if self._hooks:
            weights = {name: fingerprint(each) for name, each in pl_module.named_parameters()}
            before, self._weights = self._weights or weights, weights
            changed = next((name for name in weights if before[name] != weights[name]), "")
            self._hooks.start_micro_batch(batch, changed)

    def on_before_backward(self, *_: object, **__: object) -> None:
        if self._hooks:
            self._hooks.on_boundary()

    def _measured(self, hook: Callable, label: str) -> Callable:
        """Returns `hook`, which in the first step also records by how much it scales gradients."""

        @functools.wraps(hook)
        def measured(*args: object, **kwargs: object) -> object:
            if self._hooks is None or accumulates(self._trainer):
                return hook(*args, **kwargs)
            before = self._gradient_norm()
            result = hook(*args, **kwargs)
            factor = self._gradient_norm() / before if before else 1.0
            self._factors[label] = (factor, code_locations.of_function(hook))
            return result

        return measured

    def _gradient_norm(self) -> float:
        """Returns the norm of all gradients over all ranks. Collective if they are sharded."""
        layers = run_strategy(self._trainer.strategy).layers
        if layers.group is not None:
            norm = layers.norm([*self._module.parameters()])
            return 0.0 if norm is None else norm.item()
        total = 0.0
        for parameter in self._module.parameters():
            gradient = _full_gradient(parameter) if parameter.requires_grad else None
            if gradient is not None:
                total += gradient.double().pow(2).sum().item()
        return total**0.5

    def on_before_optimizer_step(self, *_: object, **__: object) -> None:
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            if self._hooks and parameter.requires_grad:
                gradient, owner = _full_gradient(parameter), name.rpartition(".")[0]
                if gradient is not None:
                    gradients[name] = gradient
                else:
                    passes = self._hooks.passes
                    self._missing[name] = any(owner in each["tensors"] for each in passes)
            if parameter.grad is not None:
                self._missing.pop(name, None)
        if self._hooks:
            self._save("gradients", gradients)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if self._hooks and trainer.global_step and not accumulates(trainer):
            self._hooks.remove()
            torch.save(self._hooks.passes, self.folder / f"forward{trainer.global_rank}.pt")
            buffers = {name: full(buffer) for name, buffer in self._module.named_buffers()}
            self._save("buffers", buffers)
            self._save("draws", self._hooks.draws)
            self._save("factors", self._factors)
            self._hooks = None

    # ---- the trained module ------------------------------------------------------------------

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save("dropout", self._evaluation_dropout)
        self._save("missing", self._missing)
        self._save("untied", _untied(pl_module))
        pl_module.eval()
        logits = self._call.repeat(pl_module)
        pl_module.train()
        if isinstance(logits, Tensor):  # other outputs of `forward` are not compared
            self._save("logits", (self._batch, full(logits)))

    def _save(self, name: str, value: object) -> None:
        if self._group and isinstance(value, dict):
            merged: dict[str, object] = {}
            for stage in reversed(from_all_ranks(value, self._group)):
                merged |= stage
            value = merged
        if self._trainer.is_global_zero:
            torch.save(value, self.folder / f"{name}.pt")


class _StepHooks(ForwardHooks):
    """Keeps the tensors of each micro-batch, and which modules advance the random generators."""

    def __init__(self, root: nn.Module, layers: Layers) -> None:
        self.passes: list[ForwardPass] = []
        self.draws: dict[str, str] = {}
        self._layers = layers
        super().__init__(root)

    def start_micro_batch(self, batch: object, changed: str) -> None:
        self.tensors, self.running = {}, []
        rows, labels = [*map(fingerprint, samples_in(batch))], [*map(fingerprint, labels_in(batch))]
        tensors = self.tensors
        self.passes.append({"rows": rows, "labels": labels, "tensors": tensors, "changed": changed})
        self._state = _random_state()

    def _record(self, key: str, tensor: Tensor) -> None:
        # In a pipeline all micro-batches run after the last one's start.
        number = self._layers.micro_batch_of_pass(len(self.passes) - 1)
        if number is not None:
            self.tensors = self.passes[number]["tensors"]
            super()._record(key, tensor)

    def note(self, what: str) -> None:
        self.draws.setdefault(self.running[-1] if self.running else "training_step", what)

    def on_boundary(self) -> None:
        state = _random_state()
        if state != self._state:
            self._state = state
            self.note("another random number")


def _random_state() -> tuple[str, ...]:
    """Returns the state of the generators that code uses without naming one."""
    python, of_numpy = repr(random.getstate()), repr(np.random.get_state())
    return fingerprint(torch.get_rng_state()), of_numpy, python


def _untied(module: nn.Module) -> str:
    """Names an embedding and a head of two tensors though the configuration ties them, or ""."""
    for child in module.modules():
        is_tied = getattr(getattr(child, "config", None), "tie_word_embeddings", False)
        if is_tied and hasattr(child, "get_output_embeddings"):
            model: Any = child
            ends = [model.get_input_embeddings(), model.get_output_embeddings()]
            names = [n for end in ends for n, m in module.named_modules() if m is end]
            if len(names) == 2 and ends[0].weight is not ends[1].weight:
                return " and ".join(names)
    return ""


def _full_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Returns the unsharded gradient; None for a parameter without one. Collective."""
    gradient = gradient_of(parameter)
    return None if gradient is None else full(gradient)
