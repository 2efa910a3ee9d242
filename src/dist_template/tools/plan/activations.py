"""Bytes of activations: forward and backward of a few blocks without memory, scaled.

A model with one block of each kind is traced, then with two of one kind: the difference is a block.
Gradients of parameters are not computed there: what is counted is activations, their gradients, and
the 16-bit copies of weights that autocast keeps.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat.fake import LiveBytes, fake_tensors
from ...model.head import without_head
from ...model.kernels import BOUNDS, cast_experts
from ...parallel.blocks import BlockConfig, wrap_blocks
from .blueprint import Blueprint


class Precision(NamedTuple):
    """Whether the weights that are used have 16 bits, and whether products cast to 16 bits."""

    half: bool
    casts: bool


class Activations:
    """Traces a model; `documents`: packed ones are masked; `on_gpu`: its kernels are fused."""

    def __init__(self, blueprint: Blueprint, documents: bool, on_gpu: bool) -> None:
        self._blueprint, self._documents, self._on_gpu = blueprint, documents, on_gpu
        self._traced = cache(self._trace)
        cast_experts()

    def of(self, rows: int, precision: Precision, tp: int, mode: str) -> tuple[float, float]:
        """Returns the bytes of `rows` sequences that forward keeps, and the most in backward."""
        one = two = self._all_blocks(1, precision, tp, mode)
        if precision == (False, True):  # copies of weights do not grow with the tokens
            two = self._all_blocks(2, precision, tp, mode) - one
        kept, backward = (one + (rows - 1) * two).tolist()
        return kept, backward

    def _all_blocks(self, *key: Any) -> Tensor:
        kinds = self._blueprint.kinds
        first = tuple(numbers[0] for numbers in kinds)
        base = total = self._traced(first, *key)
        for numbers in kinds:
            if len(numbers) > 1:
                more = self._traced(tuple(sorted([*first, numbers[1]])), *key)
                total = total + (len(numbers) - 1) * (more - base)
        return total

    def _trace(
        self, numbers: tuple[int, ...], rows: int, precision: Precision, tp: int, mode: Any
    ) -> Tensor:
        """Returns (2,): the bytes at the end of forward, and the peak of backward."""
        module, made = self._blueprint.module, self._blueprint.short(list(numbers), tp)
        wrap_blocks(made, BlockConfig(mode))
        leaf: list[Tensor] = []

        def detach(*given: Any) -> Tensor:
            leaf.append(given[-1].detach().requires_grad_())
            return leaf[0]

        with fake_tensors(self._on_gpu, not any(precision)):
            model = module.model = _allocated(made, precision.half)
            tokens = torch.zeros(rows, self._blueprint.data.seq_len, dtype=torch.long)
            bounds = torch.zeros(rows + 1 + self._documents, dtype=torch.int)
            model.get_input_embeddings().register_forward_hook(detach)
            counter = LiveBytes([*model.parameters(), *model.buffers(), tokens, bounds])
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision.casts)
            with counter, autocast, without_head(model):
                hidden = module({"input_ids": tokens, "position_ids": tokens, BOUNDS: bounds})
                kept = counter.peak = counter.live
                torch.autograd.grad(hidden.sum(), leaf)
        del module.model
        return torch.tensor([kept, counter.peak], dtype=torch.float64)


def _allocated(model: Any, half: bool) -> Any:
    model = model.to_empty(device="cpu").train()
    for parameter in model.parameters() if half else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    return model
