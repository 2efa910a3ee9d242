"""Callbacks of a rehearsal's trainings.

RaggedLabels   masks a different share of the labels in each row
KillAt         kills every rank
LeakageTest    tests whether a token's output depends on another document or on a later token
StepProbe      finds which token the loss predicts, and what seeds a random generator in a step
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...compat.randomness import watch_seeding
from ...text.datamodule import PackedText
from . import code_locations
from .forward_hooks import EXPERTS, ForwardCall, ForwardHooks, main_output

NOT_COUNTED = -100
MAX_MASKED_SHARE = 0.8
TOLERANCE = 1e-4  # relative to the largest value: tokens of other experts change the order of sums
NEXT = 1  # the label of token t is token t + 1
SHIFTS = (-1, 0, NEXT, 2, 3)
SHARE = 0.8  # of the counted labels; at the end of a document, the next token is another one's


class RaggedLabels(Callback):
    """Masks a different share of the labels in each row, from none to most of them.

    With full rows, a loss that is averaged per rank instead of over the tokens of the global batch
    would be correct by accident. The mask depends on the row alone, not on the number of ranks.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data = trainer.datamodule  # ty: ignore[missing-attribute]
        # `transform` of a data module without text may mean anything
        if not isinstance(data, PackedText):
            return
        transform = data.transform

        @functools.wraps(transform)
        def masked(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            batch = transform(batch)
            labels = batch["labels"].clone()
            for row in labels:
                draw = np.random.default_rng(np.abs(row.numpy()))
                share = draw.uniform(0, MAX_MASKED_SHARE)
                is_masked = torch.from_numpy(draw.random(len(row)) < share)
                is_masked[0] = False  # a micro-batch without any label has no loss
                row[is_masked] = NOT_COUNTED
            return batch | {"labels": labels}

        data.transform = masked


class KillAt(Callback):
    """Kills every rank with SIGKILL after `step` optimizer steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: object, **kwargs: object) -> None:
        if trainer.global_step >= self.step:
            trainer.strategy.barrier()  # until all checkpoints are written
            os.kill(os.getpid(), signal.SIGKILL)


class LeakageTest(Callback):
    """Writes leakage.pt: {"documents": …, "future": …}, each the first tensor that changes, or "".

    It changes tokens that must not be visible, and compares the outputs of the others. Keys as
    in `ForwardHooks.tensors`. A test that the module or its batch does not allow is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._batches: list[tuple[dict[str, Tensor], ForwardCall]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == 0 and isinstance(batch, dict) and "input_ids" in batch:
            self._batches.append((batch, ForwardCall(pl_module)))

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._batches:
            return
        batch, call = max(self._batches, key=lambda each: int(_document_starts(each[0]).sum()))
        pl_module.eval()
        found: dict[str, str] = {}
        expected = _forward(pl_module, call)
        logits = expected.get("")
        if logits is not None and logits.ndim == 3 and logits.shape[:2] == batch["input_ids"].shape:
            future = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
            future[:, future.shape[1] // 2 :] = True
            found["future"] = _first_change(pl_module, call, batch, future, expected)
            number = _document_starts(batch).cumsum(1)
            earlier = number < number[:, -1:]  # documents than the last one of a row
            data = trainer.datamodule  # ty: ignore[missing-attribute]
            if earlier.any() and not getattr(data, "cross_document_attention", False):
                found["documents"] = _first_change(pl_module, call, batch, earlier, expected)
        pl_module.train()
        torch.save(found, self.folder / "leakage.pt")


def _document_starts(batch: Mapping[str, Tensor]) -> Tensor:
    """Returns (B, T): whether a document starts at a token; False without position_ids."""
    tokens, positions = batch["input_ids"], batch.get("position_ids")
    if positions is None or positions.shape != tokens.shape:
        return torch.zeros_like(tokens, dtype=torch.bool)
    return positions == 0


def _forward(module: nn.Module, call: ForwardCall, changed: Mapping[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    hooks = ForwardHooks(module)
    call.repeat(module, changed)
    hooks.remove()
    return hooks.tensors


def _first_change(
    module: nn.Module,
    call: ForwardCall,
    batch: Mapping[str, Tensor],
    is_changed: Tensor,
    expected: Mapping[str, Tensor],
) -> str:
    """Changes tokens, (B, T); returns the first tensor that changes for the other tokens, or "".

    A tensor inside may change for tokens that its layer masks next: the logits (key "") decide.
    """
    tokens = batch["input_ids"].clone()
    ends = tokens[:, :-1][_document_starts(batch)[:, 1:]].tolist()  # they stay
    others = sorted({*tokens.flatten().tolist()} - {*ends})
    following = dict(zip(others, others[1:] + others[:1], strict=True))
    tokens[is_changed] = tokens[is_changed].apply_(lambda token: following.get(token, token))
    got = _forward(module, call, {batch["input_ids"]: tokens})
    changes: list[str] = []
    for key, want in expected.items():
        have = got.get(key)
        if have is None or have.shape != want.shape or not want.numel():
            continue
        if want.shape[:2] != tokens.shape:
            is_flat = want.ndim > 1 and len(want) == tokens.numel()
            if not is_flat or EXPERTS in key:
                continue
            want, have = want.view(*tokens.shape, -1), have.view(*tokens.shape, -1)
        change = (want - have)[~is_changed].abs().max().item()
        if not change <= TOLERANCE * want.abs().max().item():
            changes.append(key)
    return changes[0] if "" in changes else ""


class StepProbe(Callback):
    """Examines what the first micro-batch predicts, and what seeds in a step.

    shifts.pt   {"loss": shift, "batch": shift}, how far a token is from its label, and "masked":
                how many tokens count though their label is -100
    seeds.pt    {function: file:line} of the user's code that seeds a generator in a step

    "batch" is the shift of `batch["labels"]`, "loss" what the loss predicts: the gradient of a
    cross entropy is negative at the label's logit alone. A shift that no `SHARE` of the labels
    has is missing, as for a loss in chunks, whose logits never cover full rows. Code
    that restores a generator's state, as `torch.random.fork_rng` does, is not noted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens: Tensor | None = None
        self._labels: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self._predicted: list[Tensor] = []  # (B, T) tokens that logits predict, by backward order
        self._shifts: dict[str, int] = {}
        self._is_in_step = False
        self._in_this_step: dict[str, str] = {}
        self._seeds: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        def note(function: str) -> None:
            if self._is_in_step and (where := code_locations.of_caller()):
                self._in_this_step[function] = where

        def forget(function: str) -> None:
            if self._is_in_step:
                self._in_this_step.pop(function, None)

        watch_seeding(note, forget)

    def on_validation_start(self, *_: object, **__: object) -> None:
        self._is_in_step = False  # until the next step: samples may have a seed of their own

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._is_in_step = True
        self._seeds |= self._in_this_step
        self._in_this_step = {}
        tokens = batch.get("input_ids") if isinstance(batch, dict) else None
        if self._tokens is not None or not isinstance(tokens, Tensor) or tokens.ndim != 2:
            return
        self._tokens, labels = tokens, batch.get("labels")
        if isinstance(labels, Tensor) and labels.shape == tokens.shape:
            self._labels = labels
            self._find_shift("batch", labels, tokens)

        def read(gradient: Tensor) -> None:
            smallest, token = gradient.min(-1)
            self._predicted.append(token.masked_fill(smallest >= 0, NOT_COUNTED))

        def watch(module: nn.Module, args: tuple, output: object) -> None:
            logits = main_output(output)
            if isinstance(logits, Tensor) and logits.requires_grad:
                if logits.shape[:-1] == tokens.shape and logits.shape[-1] > tokens.max():
                    logits.register_hook(read)

        for module in pl_module.modules():
            self._handles.append(module.register_forward_hook(watch))

    def on_train_batch_end(self, *_: object, **__: object) -> None:
        for handle in self._handles:
            handle.remove()
        if self._predicted and self._tokens is not None:
            predicted = self._predicted[0]  # backward reaches the logits first
            self._find_shift("loss", predicted, self._tokens)
            if self._labels is not None:
                counted = predicted[self._labels == NOT_COUNTED] != NOT_COUNTED
                self._shifts["masked"] = int(counted.sum())
        self._handles, self._predicted = [], []

    def _find_shift(self, name: str, labels: Tensor, tokens: Tensor) -> None:
        length = labels.shape[1]
        for shift in SHIFTS:
            first, last = max(0, -shift), length - max(0, shift)
            have, want = labels[:, first:last], tokens[:, first + shift : last + shift]
            counted = have != NOT_COUNTED
            if counted.any() and (have == want)[counted].float().mean() >= SHARE:
                self._shifts[name] = shift

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(self._shifts, self.folder / "shifts.pt")
        torch.save(self._seeds | self._in_this_step, self.folder / "seeds.pt")
