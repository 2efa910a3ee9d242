"""Tests whether a token's output depends on another document or on a later token.

It changes tokens that must not be visible, and compares the outputs of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor

from .forward_hooks import EXPERTS, ForwardCall, ForwardHooks

TOLERANCE = 1e-4  # relative to the largest value: tokens of other experts change the order of sums
Ranges = dict[int, tuple[int, int | None]]  # {row: (first token, end)}


class LeakageTest(Callback):
    """Writes leakage.pt: {"documents": …, "future": …}, each the first tensor that changes, or "".

    Keys are those of `ForwardHooks`. A test that the module or its batch does not allow is missing.

    Args:
        folder: Destination.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._batches: list[Any] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 0:
            self._batches.append((batch, ForwardCall(pl_module)))

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        with_documents = (each for each in self._batches if _documents(each[0]))
        batch, call = next(with_documents, self._batches[0])
        if not isinstance(batch, dict) or "input_ids" not in batch:
            return
        pl_module.eval()
        found: dict[str, str] = {}
        num_rows, seq_len = batch["input_ids"].shape
        expected = _tensors(pl_module, call)
        if expected and expected[""].shape[:2] == (num_rows, seq_len):
            later: Ranges = dict.fromkeys(range(num_rows), (seq_len // 2, None))
            found["future"] = _first_change(pl_module, call, batch, later, expected)
            data: Any = trainer.datamodule  # ty: ignore[missing-attribute]
            others: Ranges = {row: (0, start) for row, start in _documents(batch).items()}
            if others and not getattr(data, "cross_document_attention", False):
                found["documents"] = _first_change(pl_module, call, batch, others, expected)
        pl_module.train()
        torch.save(found, self.folder / "leakage.pt")


def _documents(batch: Any) -> dict[int, int]:
    """Returns {row: start of its last document} of the rows that hold several documents."""
    positions = batch.get("position_ids") if isinstance(batch, dict) else None
    found: dict[int, int] = {}
    for row, each in enumerate(positions if isinstance(positions, Tensor) else ()):
        starts = (each == 0).nonzero().flatten().tolist()
        if starts and starts[-1] > 1:
            found[row] = starts[-1]
    return found


def _tensors(module: Any, call: ForwardCall, changed: Any = None) -> dict[str, Tensor]:
    hooks = ForwardHooks(module)
    try:
        logits = call.repeat(module, changed)
    finally:
        hooks.remove()
    return hooks.tensors if isinstance(logits, Tensor) and logits.ndim == 3 else {}


def _first_change(
    module: Any, call: ForwardCall, batch: Any, ranges: Ranges, expected: Mapping[str, Tensor]
) -> str:
    """Changes the tokens in `ranges`; returns the first tensor that changes elsewhere, or "".

    A tensor inside may change for tokens that its layer masks next: the logits (key "") decide.
    """
    tokens = _with_other_tokens(batch, ranges)
    shape = tuple(tokens.shape)
    got = _tensors(module, call, {batch["input_ids"]: tokens})
    changed: list[str] = []
    for key, want in expected.items():
        have = got.get(key)
        if have is None or have.shape != want.shape or not want.numel():
            continue
        if want.shape[:2] != shape:
            is_flat = want.ndim > 1 and len(want) == shape[0] * shape[1]
            if not is_flat or EXPERTS in key:
                continue
            want, have = want.view(*shape, -1), have.view(*shape, -1)
        largest = want.abs().max().item()
        for row, (start, end) in ranges.items():
            kept = slice(end, None) if start == 0 else slice(0, start)
            if not (want[row, kept] - have[row, kept]).abs().max().item() <= TOLERANCE * largest:
                changed.append(key)
    return changed[0] if "" in changed else ""


def _with_other_tokens(batch: Any, ranges: Ranges) -> Tensor:
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
