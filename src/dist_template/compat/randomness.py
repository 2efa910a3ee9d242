"""Replaces torch's functions that drop out or use a batch's statistics, in a process that trains
once, to rehearse it. Verified on torch 2.9 to 2.13.

torch has no switch or hook for them. The names are public: where one is gone, the functions raise
AttributeError, as tests/compat/test_loop.py shows."""

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


def use_running_statistics(note: Callable[[], object]) -> None:
    """Makes normalization over a batch (BatchNorm, and InstanceNorm that tracks) use its running
    statistics, and leave them as they are: each rank would compute those of its own batches.
    `note` is called wherever a batch's statistics would have been used."""
    functional = torch.nn.functional
    batch_norm, instance_norm = functional.batch_norm, functional.instance_norm

    def of_running(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        if training and running_mean is not None:
            note()
            training = False
        return batch_norm(
            input, running_mean, running_var, weight, bias, training, *args, **options
        )

    def without_tracking(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        if use_input_stats and running_mean is not None:
            note()
            running_mean = running_var = None  # a sample's own statistics, as in training
        return instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, *args, **options
        )

    _replace(functional, "batch_norm", of_running)
    _replace(functional, "instance_norm", without_tracking)


def _replace(module: ModuleType, name: str, function: Callable) -> None:
    getattr(module, name)  # raises AttributeError where the version has no such function
    setattr(module, name, function)
