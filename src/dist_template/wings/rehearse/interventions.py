"""Callbacks of a rehearsal's trainings.

RaggedLabels   masks a different share of the labels in each row
KillAt         kills every rank
NotANumber     makes a step's gradients NaN
LeakageTest    tests whether a token's output depends on another document, on a later token or on
               where in its row its document is"""

import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn

from ...compat.epochs import ends_epoch
from ...text.batches.rows import NOT_COUNTED
from ...text.datamodule import PackedText
from ...text.model.kernels import BOUNDS
from .forward_hooks import ForwardHooks

Moved = dict[int, Tensor]  # by the `id` of the tensor before

MAX_MASKED_SHARE = 0.8
TOLERANCE = 1e-4  # relative to the largest value: tokens of other experts change the order of sums


class RaggedLabels(Callback):
    """Masks a different share of the labels in each row, from none to most of them. With full rows,
    a loss that is averaged per rank instead of over the tokens of the global batch would be correct
    by accident. The mask depends on the row alone, not on the number of ranks."""

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


class KillAt(Checkpoint):
    """Kills every rank with SIGKILL after `step` optimizer steps, when their checkpoint is written:
    after an epoch's last step, at the end of the epoch.

    It is a `Checkpoint`, because Lightning calls those last, after those that save."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: object, **kwargs: object) -> None:
        if not ends_epoch(trainer):
            self.after_epoch(trainer)

    def after_epoch(self, trainer: L.Trainer) -> None:
        if trainer.global_step >= self.step:
            trainer.strategy.barrier()  # until all checkpoints are written
            os.kill(os.getpid(), signal.SIGKILL)


class NotANumber(Callback):
    """Makes the gradients of optimizer step `step` NaN, as an overflow does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        def overflow(gradient: Tensor) -> Tensor:
            if trainer.global_step + 1 == self.step:
                return gradient * float("nan")
            return gradient

        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(overflow)


class LeakageTest(Callback):
    """Writes leakage.pt: {"documents": …, "future": …, "place": …}, each the first tensor that
    changes, or "". It changes tokens that must not be visible, and compares the outputs of the
    others; and it moves the last document of each row to its front, where it is alone, and compares
    that document's outputs. Keys as in `ForwardHooks.tensors`. A test that the module or its batch
    does not allow is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._batch: Any = None
        self._arguments: tuple = ()  # of the first forward

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: nn.Module, batch: Any, batch_idx: int
    ) -> None:
        if self._batch is None:
            self._batch = batch

            def keep(module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
                self._arguments = (args, kwargs)
                hook.remove()

            hook = pl_module.register_forward_pre_hook(keep, with_kwargs=True)

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._arguments or not isinstance(self._batch, dict):
            return
        if "input_ids" not in self._batch:
            return
        tokens = self._batch["input_ids"]
        starts = self._batch.get("position_ids", torch.ones_like(tokens)) == 0  # of documents
        if starts.shape != tokens.shape:
            starts = torch.zeros_like(tokens, dtype=torch.bool)
        # Each token becomes the next one of those in the batch. The ends of documents stay, as
        # other tokens there would join documents.
        ends = tokens[:, :-1][starts[:, 1:]].tolist()
        others = sorted(set(tokens.flatten().tolist()) - set(ends))
        following = dict(zip(others, others[1:] + others[:1], strict=True))

        def outputs_with(change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
            """Repeats the first forward pass with each tensor replaced by `change`."""
            hooks = ForwardHooks(pl_module)
            args, kwargs = apply_to_collection(self._arguments, Tensor, change)
            pl_module(*args, **kwargs)
            hooks.remove()
            return hooks.tensors

        def outputs(is_changed: Tensor) -> dict[str, Tensor]:
            changed = tokens.clone()
            changed[is_changed] = changed[is_changed].apply_(
                lambda token: following.get(token, token)
            )
            return outputs_with(lambda tensor: changed if tensor is tokens else tensor)

        pl_module.eval()
        first_changes: dict[str, str] = {}
        later = torch.zeros_like(tokens, dtype=torch.bool)
        expected = outputs(later)
        logits = expected.get("")
        if logits is not None and logits.ndim == 3 and logits.shape[:2] == tokens.shape:
            later[:, later.shape[1] // 2 :] = True
            first_changes["future"] = _first_change(expected, outputs(later), ~later)
            number = starts.cumsum(1)  # of a token's document in its row
            earlier = number < number[:, -1:]  # documents than the last one of a row
            data = trainer.datamodule  # ty: ignore[missing-attribute]
            if earlier.any() and not getattr(data, "cross_document_attention", False):
                in_documents = _first_change(expected, outputs(earlier), ~earlier)
                first_changes["documents"] = in_documents
                if not in_documents:  # else the last document sees others until it is moved
                    order, moved = _last_document_first(self._batch, earlier)
                    want = {key: _reordered(tensor, order) for key, tensor in expected.items()}
                    got = outputs_with(lambda tensor: moved.get(id(tensor), tensor))
                    is_last = ~earlier.gather(1, order)
                    first_changes["place"] = _first_change(want, got, is_last)
        pl_module.train()
        torch.save(first_changes, self.folder / "leakage.pt")


def _last_document_first(batch: Mapping[str, Any], earlier: Tensor) -> tuple[Tensor, Moved]:
    """Moves the last document of each row of a batch to the front of its row.

    Returns (B, T) where each token of a row comes from, and the changed tensors by the `id` of
    those that they replace. `earlier` (B, T) are the tokens of the other documents."""
    order = earlier.long().argsort(dim=1, stable=True)
    moved: Moved = {}
    for value in batch.values():
        if _is_of(value, order):
            moved[id(value)] = _reordered(value, order)
    bounds = batch.get(BOUNDS)
    if isinstance(bounds, Tensor):  # where documents start in the flat batch, and its length
        starts = torch.nonzero(moved[id(batch["position_ids"])].flatten() == 0).flatten()
        ends = torch.tensor([earlier.numel()], device=starts.device)
        moved[id(bounds)] = torch.cat([starts, ends]).to(bounds.dtype)
    return order, moved


def _is_of(value: object, tokens: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == tokens.shape


def _reordered(values: Tensor, order: Tensor) -> Tensor:
    """Returns (B, T, …) values in the order (B, T) of their tokens; other tensors as they are."""
    if not _is_of(values, order):
        return values
    return values[torch.arange(len(order), device=order.device)[:, None], order]


def _first_change(
    expected: Mapping[str, Tensor], got: Mapping[str, Tensor], is_compared: Tensor
) -> str:
    """Returns the first tensor that changes for the tokens of (B, T) `is_compared`, or "". A tensor
    inside may change for tokens that its layer masks next: the logits (key "") decide."""
    changes: list[str] = []
    for key, want in expected.items():
        have = got.get(key)
        if have is None or have.shape != want.shape or want.shape[:2] != is_compared.shape:
            continue
        change = (want - have)[is_compared].abs().max().item()
        if not change <= TOLERANCE * want.abs().max().item():
            changes.append(key)
    if "" not in changes:
        return ""
    return changes[0] or "the logits"  # whose key is ""
