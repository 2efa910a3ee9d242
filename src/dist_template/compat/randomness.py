"""Replaces torch's functions that drop out, in a process that trains once, to rehearse it. Verified
on torch 2.9 to 2.13.

torch has no switch or hook for them. The names are public: where one is gone, `turn_dropout_off`
raises AttributeError, as tests/compat/test_loop.py shows."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
DROPOUTS += ("alpha_dropout", "feature_alpha_dropout")


def turn_dropout_off(note: Callable[[], object]) -> None:
    """Replaces torch's dropout functions by the identity, and the dropout of its attention by 0.
    `note` is called wherever one of them would have dropped out."""
    functional = torch.nn.functional

    def identity(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if training and p:
            note()
        return input

    attention = functional.scaled_dot_product_attention

    def without_dropout(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        if dropout_p:
            note()
        return attention(query, key, value, attn_mask, 0.0, *args, **options)

    for name in DROPOUTS:
        _replace(functional, name, identity)
    _replace(functional, "scaled_dot_product_attention", without_dropout)


def _replace(module: ModuleType, name: str, function: Callable) -> None:
    getattr(module, name)  # raises AttributeError where the version has no such function
    setattr(module, name, function)
