"""Records outputs and gradients of the first step, to find what makes losses differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from ...compat.lightning import accumulates
from ...parallel import run_strategy
from ...parallel.pipeline.division import RemoteModule
from ...parallel.run_strategy import Layers
from ...weights import from_all_ranks
from . import code_locations
from .forward_hooks import ForwardCall, ForwardHooks, full
from .gradient_hooks import gradient_of
from .recorder import fingerprint, labels_in, samples_in

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
DROPOUTS += ("alpha_dropout", "feature_alpha_dropout")
STEPS = ("training_step", "forward", "validation_step", "build_model", "configure_model")
STEPS += ("configure_optimizers",)


class Details(Callback):
    """Saves forward passes and gradients of the first step, and the trained model's logits.

    forward<rank>.pt   per micro-batch: rows and labels (a hash of each sample's), tensors (see
                       `ForwardHooks`), changed: a parameter with another value than before, or ""
    places.pt          {module: class and file:line}; also of training_step, forward, datamodule,
                       optimizer, order
    draws.pt           {module: "dropout", or another use of the random generator in its forward}
    gradients.pt       {parameter: unsharded gradient} after the first backward, before clipping
    buffers.pt         {buffer: value} after the first step
    untied.pt          names of an embedding and a head that the architecture ties and that are two
    dropout.pt         where an evaluation drops out, file:line of the user's code, or ""
    missing.pt         {parameter that never gets a gradient: whether its module's forward ran}
    logits.pt          (batch, logits) of the trained module

    Rank 0 writes all but the first, in a pipeline with those of all stages. An error in the first
    forward pass gets a note with its module.

    Args:
        folder: Destination.
        dropout_is_off: Replaces dropout by the identity, because random masks differ between ranks.
    """

    def __init__(self, folder: Path, dropout_is_off: bool = False) -> None:
        self.folder = folder
        self.dropout_is_off = dropout_is_off
        self._hooks: _Draws | None = None
        self._passes: list[dict[str, Any]] = []
        self._batch: Any = None
        self._in_evaluation = ""
        self._missing: dict[str, bool] = {}
        self._weights: dict[str, str] = {}

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self.dropout_is_off:
            _turn_dropout_off(lambda: self._note_dropout(trainer))

    def _note_dropout(self, trainer: L.Trainer) -> None:
        if trainer.evaluating and not self._in_evaluation:
            self._in_evaluation = code_locations.of_caller() or "a callback"
        if self._hooks:
            self._hooks.note("dropout")

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        layers = run_strategy(trainer.strategy).layers
        self._group = layers.group
        self._hooks = _Draws(pl_module, self._passes, layers)
        self._call = ForwardCall(pl_module)
        data: Any = trainer.datamodule  # ty: ignore[missing-attribute]
        order = getattr(trainer.train_dataloader, "batch_sampler", None)
        modules = [(n, m) for n, m in pl_module.named_modules() if not isinstance(m, RemoteModule)]
        places = {name: code_locations.of_module(module) for name, module in modules}
        for name in STEPS:
            if hasattr(pl_module, name):
                places[name] = code_locations.of_function(getattr(pl_module, name))
        places["transform"] = code_locations.of_function(getattr(data, "transform", None))
        owners = {"datamodule": data, "optimizer": trainer.optimizers[0], "order": order}
        for name, owner in owners.items():
            places[name] = code_locations.of_class(type(owner))
        self._save(trainer, "places", places)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        if self._hooks and self._hooks.inside:
            module = self._hooks.inside[-1] or "the module"
            exception.add_note(f"in the forward pass of {module}")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch if self._batch is None else self._batch
        if self._hooks:
            rows, labels = samples_in(batch), labels_in(batch)
            self._hooks.begin([*map(fingerprint, rows)], [*map(fingerprint, labels)])
            weights = {name: fingerprint(each) for name, each in pl_module.named_parameters()}
            before = self._weights or weights
            self._passes[-1]["changed"] = next((n for n in weights if before[n] != weights[n]), "")
            self._weights = weights

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        if self._hooks:
            self._hooks.changed()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        trained = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        if self._hooks:
            gradients: dict[str, Tensor] = {}
            for name, parameter in trained.items():
                gradient = gradient_of(parameter)
                if gradient is None:
                    owner = name.rpartition(".")[0]
                    self._missing[name] = any(owner in each["tensors"] for each in self._passes)
                else:
                    gradients[name] = gradient
            self._save(trainer, "gradients", gradients)
        self._missing = {n: ran for n, ran in self._missing.items() if trained[n].grad is None}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        if self._hooks and trainer.global_step and not accumulates(trainer):
            self._hooks.remove()
            torch.save(self._passes, self.folder / f"forward{trainer.global_rank}.pt")
            self._save(trainer, "draws", self._hooks.draws)
            buffers = {name: full(buffer) for name, buffer in pl_module.named_buffers()}
            self._save(trainer, "buffers", buffers)
            self._hooks = None

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._save(trainer, "dropout", self._in_evaluation)
        self._save(trainer, "missing", self._missing)
        self._save(trainer, "untied", _untied(pl_module))
        pl_module.eval()
        logits = self._call.repeat(pl_module)
        pl_module.train()
        if isinstance(logits, Tensor):  # other outputs of `forward` are not compared
            self._save(trainer, "logits", (self._batch, full(logits)))

    def _save(self, trainer: L.Trainer, name: str, value: Any) -> None:
        if self._group and isinstance(value, dict):
            stages = from_all_ranks(value, self._group)
            value = {key: part[key] for part in reversed(stages) for key in part}
        if trainer.is_global_zero:
            torch.save(value, self.folder / f"{name}.pt")


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


class _Draws(ForwardHooks):
    """Also records which modules advance the random generator in their own code."""

    def __init__(self, root: nn.Module, passes: list[dict[str, Any]], layers: Layers) -> None:
        self.draws: dict[str, str] = {}
        self.passes, self._layers = passes, layers
        super().__init__(root)

    def begin(self, rows: list[str], labels: list[str]) -> None:
        """Called at the start of a micro-batch."""
        self.tensors, self.inside = {}, []
        self.passes.append({"rows": rows, "labels": labels, "tensors": self.tensors})
        self._state = _random_state()

    def _keep(self, key: str, value: Any) -> None:
        # In a pipeline all micro-batches run after the last one's start.
        number = self._layers.micro_batch_of_pass(len(self.passes) - 1)
        if number is not None:
            self.tensors = self.passes[number]["tensors"]
            super()._keep(key, value)

    def note(self, what: str) -> None:
        self.draws.setdefault(self.inside[-1] if self.inside else "training_step", what)

    def changed(self) -> None:
        state = _random_state()
        if state != self._state:
            self._state = state
            self.note("another random number")


def _random_state() -> tuple[str, ...]:
    """Of the generators that code uses without naming one: torch's, numpy's, Python's."""
    states = (random.getstate(), np.random.get_state())
    return fingerprint(torch.get_rng_state()), *map(repr, states)


def _turn_dropout_off(note: Callable[[], Any]) -> None:
    """Replaces torch's dropout functions in this process, which runs one training."""

    def identity(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p:
            note()
        return input

    functional: Any = torch.nn.functional
    for name in DROPOUTS:
        setattr(functional, name, identity)
    attention = functional.scaled_dot_product_attention

    def without_dropout(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        if dropout_p:
            note()
        return attention(query, key, value, attn_mask, 0.0, *args, **options)

    functional.scaled_dot_product_attention = without_dropout
