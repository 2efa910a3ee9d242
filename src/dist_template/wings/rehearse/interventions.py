"""Callbacks of a rehearsal's trainings.

RaggedLabels   masks a different share of the labels in each row
KillAt         kills every rank
LeakageTest    tests whether a token's output depends on another document or on a later token
LabelProbe     finds which token the loss predicts
SeedProbe      finds what seeds a random generator in a step
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
from ...model.any_module import owns_order
from . import code_locations
from .forward_hooks import EXPERTS, ForwardCall, ForwardHooks, main_output

NOT_COUNTED = -100
MAX_MASKED_SHARE = 0.8
TOLERANCE = 1e-4  # relative to the largest value: tokens of other experts change the order of sums
Ranges = dict[int, tuple[int, int | None]]  # {row: (first token, end)}

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
        if not owns_order(data):  # `transform` of a data module without text may mean anything
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

    It changes tokens that must not be visible, and compares the outputs of the others. Keys are
    those of `ForwardHooks`. A test that the module or its batch does not allow is missing.

    Args:
        folder: Destination.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._batches: list[tuple[object, ForwardCall]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == 0:
            self._batches.append((batch, ForwardCall(pl_module)))

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batch, self._call = self._batches[0]
        for other, call in reversed(self._batches):
            if _last_documents(other):
                batch, self._call = other, call
        if not isinstance(batch, dict) or "input_ids" not in batch:
            return
        pl_module.eval()
        found: dict[str, str] = {}
        num_rows, seq_len = batch["input_ids"].shape
        expected = self._forward(pl_module)
        if expected and expected[""].shape[:2] == (num_rows, seq_len):
            later: Ranges = dict.fromkeys(range(num_rows), (seq_len // 2, None))
            found["future"] = self._first_change(pl_module, batch, later, expected)
            data = trainer.datamodule  # ty: ignore[missing-attribute]
            others: Ranges = {row: (0, start) for row, start in _last_documents(batch).items()}
            if others and not getattr(data, "cross_document_attention", False):
                found["documents"] = self._first_change(pl_module, batch, others, expected)
        pl_module.train()
        torch.save(found, self.folder / "leakage.pt")

    def _forward(
        self, module: nn.Module, changed: Mapping[Tensor, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Returns all tensors of a forward pass; {} if it does not return logits of rows."""
        hooks = ForwardHooks(module)
        logits = self._call.repeat(module, changed)
        hooks.remove()
        return hooks.tensors if logits is not None and logits.ndim == 3 else {}

    def _first_change(
        self,
        module: nn.Module,
        batch: Mapping[str, Tensor],
        ranges: Ranges,
        expected: Mapping[str, Tensor],
    ) -> str:
        """Changes the tokens in `ranges`; returns the first tensor that changes elsewhere, or "".

        A tensor inside may change for tokens that its layer masks next: the logits (key "") decide.
        """
        tokens = _with_other_tokens(batch, ranges)
        shape = tuple(tokens.shape)
        got = self._forward(module, {batch["input_ids"]: tokens})
        changed: list[str] = []
        for key, want in expected.items():
            have = got.get(key)
            if have is None or have.shape != want.shape or not want.numel():
                continue
            if want.shape[:2] != shape:
                is_flat = want.ndim > 1 and len(want) == tokens.numel()
                if not is_flat or EXPERTS in key:
                    continue
                want, have = want.view(*shape, -1), have.view(*shape, -1)
            largest = want.abs().max().item()
            for row, (start, end) in ranges.items():
                kept = slice(0, start) if start else slice(end, None)
                change = (want[row, kept] - have[row, kept]).abs().max().item()
                if not change <= TOLERANCE * largest:
                    changed.append(key)
        return changed[0] if "" in changed else ""


def _last_documents(batch: object) -> dict[int, int]:
    """Returns {row: start of its last document} of the rows that hold several documents."""
    positions = batch.get("position_ids") if isinstance(batch, dict) else None
    found: dict[int, int] = {}
    for row, each in enumerate(positions if isinstance(positions, Tensor) else ()):
        starts = (each == 0).nonzero().flatten().tolist()
        if starts and starts[-1] > 1:
            found[row] = starts[-1]
    return found


def _with_other_tokens(batch: Mapping[str, Tensor], ranges: Ranges) -> Tensor:
    """Returns input_ids with other tokens in `ranges`; document ends stay."""
    tokens = batch["input_ids"].clone()
    ends = tokens[:0, 0]
    if "position_ids" in batch:
        ends = tokens[:, :-1][batch["position_ids"][:, 1:] == 0]
    others = [token for token in tokens.unique().tolist() if token not in ends]
    following = dict(zip(others, others[1:] + others[:1], strict=True))
    for row, (start, end) in ranges.items():
        tokens[row, start:end].apply_(lambda token: following.get(token, token))
    return tokens


class LabelProbe(Callback):
    """Writes shifts.pt: {"loss": shift, "batch": shift}, how far a token is from its label, with
    "masked": how many tokens count though their label is -100.

    "batch" is that of `batch["labels"]`, "loss" what the loss really predicts: the gradient of a
    cross entropy is negative at the label's logit alone. A shift that no `SHARE` of the labels
    has is missing, as for a loss in chunks, whose logits are never those of whole rows.

    Args:
        folder: Destination.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens: Tensor | None = None
        self._is_masked: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self._predicted: list[Tensor] = []  # (B, T) tokens that logits predict, by backward order
        self._found: dict[str, int] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        tokens = batch.get("input_ids") if isinstance(batch, dict) else None
        if self._tokens is not None or not isinstance(tokens, Tensor) or tokens.ndim != 2:
            return
        self._tokens = tokens
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.shape == tokens.shape:
            self._find_shift("batch", labels, tokens)
            self._is_masked = labels == NOT_COUNTED
        for module in pl_module.modules():
            watch = functools.partial(self._watch_logits, tokens)
            self._handles.append(module.register_forward_hook(watch))

    def _watch_logits(self, tokens: Tensor, module: nn.Module, args: tuple, output: object) -> None:
        logits = main_output(output)
        if isinstance(logits, Tensor) and logits.requires_grad:
            if logits.shape[:-1] == tokens.shape and logits.shape[-1] > tokens.max():
                logits.register_hook(self._read_gradient)

    def _read_gradient(self, gradient: Tensor) -> None:
        smallest, token = gradient.min(-1)
        self._predicted.append(token.masked_fill(smallest >= 0, NOT_COUNTED))

    def on_train_batch_end(self, *_: object, **__: object) -> None:
        for handle in self._handles:
            handle.remove()
        if self._predicted and self._tokens is not None:
            predicted = self._predicted[0]  # backward reaches the logits first
            self._find_shift("loss", predicted, self._tokens)
            if self._is_masked is not None:
                counted = predicted[self._is_masked] != NOT_COUNTED
                self._found["masked"] = int(counted.sum())
        self._handles, self._predicted = [], []

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(self._found, self.folder / "shifts.pt")

    def _find_shift(self, name: str, labels: Tensor, tokens: Tensor) -> None:
        length = labels.shape[1]
        for shift in SHIFTS:
            first, last = max(0, -shift), length - max(0, shift)
            have, want = labels[:, first:last], tokens[:, first + shift : last + shift]
            counted = have != NOT_COUNTED
            if counted.any() and (have == want)[counted].float().mean() >= SHARE:
                self._found[name] = shift


class SeedProbe(Callback):
    """Writes seeds.pt: {function: file:line} of the user's code that seeds a generator in a step.

    One that sets the state back that it found, as `torch.random.fork_rng` does, is not noted.

    Args:
        folder: Destination.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_in_step = False
        self._noted: dict[str, str] = {}  # in the current step
        self._found: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        def note(function: str) -> None:
            if self._is_in_step and (where := code_locations.of_caller()):
                self._noted[function] = where

        def forget(function: str) -> None:
            if self._is_in_step:
                self._noted.pop(function, None)

        watch_seeding(note, forget)

    def on_train_batch_start(self, *_: object, **__: object) -> None:
        self._is_in_step = True
        self._found |= self._noted
        self._noted = {}

    def on_validation_start(self, *_: object, **__: object) -> None:
        self._is_in_step = False  # until the next step: samples may have a seed of their own

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(self._found | self._noted, self.folder / "seeds.pt")
