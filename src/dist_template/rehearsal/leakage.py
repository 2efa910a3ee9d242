"""Tests whether a token's output depends on another document or on a later token.

Changes tokens that must not be visible, and compares the outputs of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor

from .forward_hooks import ForwardCall, ForwardHooks, describe

TOLERANCE = 1e-4  # relative to the largest value: tokens of other experts change the order of summation
Places = Mapping[str, str]


class LeakageTest(Callback):
    """Writes leakage.pt: {"documents": …, "future": …}, each the first key of `ForwardHooks` that changes, or "".

    A test that this module or its batch does not allow is missing.

    Args:
        folder: Destination.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._batches: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            self._batches.append((batch, ForwardCall(pl_module)))

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        data: Any = trainer.datamodule  # ty: ignore[missing-attribute]
        batch, call = next((each for each in self._batches if _documents(each[0])), self._batches[0])
        if not isinstance(batch, dict) or "input_ids" not in batch:
            return
        pl_module.eval()
        found, rows = {}, len(batch["input_ids"])
        expected = _tensors(pl_module, call)
        if expected and expected[""].shape[:2] == batch["input_ids"].shape:
            half = batch["input_ids"].shape[1] // 2
            changed = {row: (half, None) for row in range(rows)}
            kept = {row: (0, half) for row in range(rows)}
            found["future"] = _first_change(pl_module, call, batch, changed, kept, expected)
            if (starts := _documents(batch)) and not getattr(data, "cross_document_attention", False):
                changed = {row: (0, start) for row, start in starts.items()}
                kept = {row: (start, None) for row, start in starts.items()}
                found["documents"] = _first_change(pl_module, call, batch, changed, kept, expected)
        pl_module.train()
        torch.save(found, self.folder / "leakage.pt")


def _documents(batch: Any) -> dict[int, int]:
    """Returns {row: start of its last document} of the rows that hold several documents."""
    positions = batch.get("position_ids") if isinstance(batch, dict) else None
    if not isinstance(positions, Tensor):
        return {}
    starts = {row: (each == 0).nonzero().flatten().tolist() for row, each in enumerate(positions)}
    return {row: found[-1] for row, found in starts.items() if found and found[-1] > 1}


def _tensors(module: Any, call: ForwardCall, changed: Mapping[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    hooks = ForwardHooks(module)
    try:
        logits = call.repeat(module, changed)
    finally:
        hooks.remove()
    return hooks.tensors if isinstance(logits, Tensor) and logits.ndim == 3 else {}


def _first_change(
    module: Any, call: ForwardCall, batch: Any, changed: dict, kept: dict, expected: Mapping[str, Tensor]
) -> str:
    """Returns the first tensor that changes in the ranges `kept`, {row: (start, end)}, if tokens in `changed` do."""
    tokens = batch["input_ids"].clone()
    shape = tuple(tokens.shape)
    ends = tokens[:, :-1][batch["position_ids"][:, 1:] == 0] if "position_ids" in batch else tokens[:0, 0]
    others = [token for token in tokens.unique().tolist() if token not in ends]  # document ends stay
    following = dict(zip(others, others[1:] + others[:1], strict=True))
    for row, (start, end) in changed.items():
        tokens[row, start:end].apply_(lambda token: following.get(token, token))
    got = _tensors(module, call, {batch["input_ids"]: tokens})
    for key, want in expected.items():
        have = got.get(key)
        if have is None or have.shape != want.shape or not want.numel():
            continue
        if want.shape[:2] != shape:
            if want.ndim < 2 or want.shape[0] != shape[0] * shape[1] or ".experts." in key:
                continue
            want, have = want.view(*shape, -1), have.view(*shape, -1)
        largest = want.abs().max().item()
        for row, (start, end) in kept.items():
            if not (want[row, start:end] - have[row, start:end]).abs().max().item() <= TOLERANCE * largest:
                return key
    return ""


def sentence(key: str, places: Places) -> str:
    """Names the first tensor that changes, and the code that passes document boundaries to the model."""
    forward = places.get("forward", "?")
    return f"the first change is in {describe(key, places)}; forward ({forward}) passes the document boundaries"
