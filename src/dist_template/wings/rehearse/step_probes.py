"""Watches the training step of one process: which token its loss predicts, and who seeds in it."""

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
from torch import Tensor

from . import code_locations
from .interventions import NOT_COUNTED

NEXT = 1  # the label of token t is token t + 1
SHIFTS = (-1, 0, NEXT, 2, 3)
SHARE = 0.8  # of the counted labels; at the end of a document, the next token is another one's


class LabelProbe(Callback):
    """Writes shifts.pt: {"loss": shift, "batch": shift}, how far a token is from its label, with
    "masked": how many tokens count though their label is -100.

    "batch" is that of `batch["labels"]`, "loss" what the loss really predicts: the gradient of a
    cross entropy is negative at the label's logit alone. A distance that no `SHARE` of the labels
    has is missing, as for a loss in chunks, whose logits are never those of whole rows.

    Args:
        folder: Destination.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens: Tensor | None = None
        self._handles: list[Any] = []
        self._predicted: dict[str, Tensor] = {}  # module: (B, T) tokens that its logits predict
        self._found: dict[str, int] = {}
        self._is_masked: Tensor | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        tokens = batch.get("input_ids") if isinstance(batch, dict) else None
        if self._tokens is not None or not isinstance(tokens, Tensor) or tokens.ndim != 2:
            return
        self._tokens = tokens
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.shape == tokens.shape:
            self._find("batch", labels)
            self._is_masked = labels == NOT_COUNTED
        for name, module in pl_module.named_modules():
            self._handles.append(module.register_forward_hook(self._watch(name)))

    def _watch(self, name: str) -> Callable[..., None]:
        def watch(module: Any, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) and output else output
            logits, tokens = getattr(output, "logits", output), self._tokens
            if not isinstance(logits, Tensor) or tokens is None or not logits.requires_grad:
                return
            if logits.shape[:-1] == tokens.shape and logits.shape[-1] > tokens.max():
                logits.register_hook(functools.partial(self._keep, name))

        return watch

    def _keep(self, name: str, gradient: Tensor) -> None:
        smallest, token = gradient.min(-1)
        self._predicted[name] = token.masked_fill(smallest >= 0, NOT_COUNTED)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        for handle in self._handles:
            handle.remove()
        for predicted in self._predicted.values():  # backward reaches the logits first
            self._find("loss", predicted)
            if self._is_masked is not None:
                counted = predicted[self._is_masked] != NOT_COUNTED
                self._found["masked"] = int(counted.sum())
            break
        self._handles, self._predicted = [], {}

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        torch.save(self._found, self.folder / "shifts.pt")

    def _find(self, name: str, labels: Tensor) -> None:
        assert self._tokens is not None
        length = labels.shape[1]
        for shift in SHIFTS:
            first, last = max(0, -shift), length - max(0, shift)
            have, want = labels[:, first:last], self._tokens[:, first + shift : last + shift]
            counted = have != NOT_COUNTED
            if counted.any() and (have == want)[counted].float().mean() >= SHARE:
                self._found[name] = shift


class SeedProbe(Callback):
    """Writes seeds.pt: {function: file:line} of the user's code that seeds a generator in a step.

    One that puts the state back that it found, as `torch.random.fork_rng` does, is not noted.

    Args:
        folder: Destination.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_in_step = False
        self._noted: dict[str, str] = {}
        self._found: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for label, owners, seed, restore in (
            ("torch.manual_seed", (torch, torch.random), "manual_seed", "set_rng_state"),
            ("random.seed", (random,), "seed", "setstate"),
            ("numpy.random.seed", (np.random,), "seed", "set_state"),
        ):
            for owner in owners:
                setattr(owner, seed, self._with(getattr(owner, seed), self._note, label))
                setattr(owner, restore, self._with(getattr(owner, restore), self._forget, label))

    def _with(self, function: Any, then: Callable[[str], None], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_step:
                then(label)
            return function(*args, **kwargs)

        return called

    def _note(self, label: str) -> None:
        if where := code_locations.of_caller():
            self._noted[label] = where

    def _forget(self, label: str) -> None:
        self._noted.pop(label, None)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._is_in_step = True
        self._found |= self._noted
        self._noted = {}

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        self._is_in_step = False  # until the next step: samples may have a seed of their own

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        torch.save(self._found | self._noted, self.folder / "seeds.pt")
