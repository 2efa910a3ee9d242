"""Replaces torch's, numpy's and Python's functions that drop out or seed, in a process that trains
once, to rehearse it. Verified on torch 2.9 to 2.13, numpy 2 and Python 3.11 to 3.14.

No library has a switch or a hook for them. The names are public: where one is gone, its function
raises AttributeError, as tests/compat/test_randomness.py shows.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
DROPOUTS += ("alpha_dropout", "feature_alpha_dropout")
GENERATORS: tuple[tuple[str, ModuleType, str, str], ...] = (  # label, module, seeds, restores
    ("torch.manual_seed", torch, "manual_seed", "set_rng_state"),
    ("torch.manual_seed", torch.random, "manual_seed", "set_rng_state"),
    ("random.seed", random, "seed", "setstate"),
    ("numpy.random.seed", np.random, "seed", "set_state"),
)


def turn_dropout_off(note: Callable[[], object]) -> None:
    """Replaces torch's dropout functions by the identity, and the dropout of its attention by 0.

    `note` is called wherever one of them would have dropped out.
    """
    functional = torch.nn.functional

    def identity(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
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


def watch_seeding(seeds: Callable[[str], None], restores: Callable[[str], None]) -> None:
    """Calls `seeds`, with the seeding function's name, before each use of it, and `restores` before
    the state of the same generator is set, as at the end of `torch.random.fork_rng`."""
    for label, module, seed, restore in GENERATORS:
        for name, watch in ((seed, seeds), (restore, restores)):
            _replace(module, name, _watched(getattr(module, name), functools.partial(watch, label)))


def _watched(function: Callable, before: Callable[[], None]) -> Callable:
    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        before()
        return function(*args, **kwargs)

    return called


def _replace(module: ModuleType, name: str, function: Callable) -> None:
    getattr(module, name)  # raises AttributeError where the version has no such function
    setattr(module, name, function)
