"""Tensors that lie differently over the ranks: grouping them, and one norm over all of them.

Under tensor or expert parallelism some parameters are plain tensors and others DTensors on different meshes. torch's
functions over lists (fused AdamW, `get_total_norm`, `clip_grad_norm_`) refuse the mixture: they get a group at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import InputError


def layout(tensor: Tensor) -> Hashable:
    """What must be equal for two tensors to go into one call: the mesh and the placements; None for a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def whole_shape(tensor: Tensor) -> torch.Size:
    """Of all ranks' parts together: under ZeRO-3 a parameter itself is empty, and its shape stands in `ds_shape`."""
    return getattr(tensor, "ds_shape", tensor.shape)


def refuse_scalars(model: nn.Module, what: str) -> None:
    """Refuse parameters of no dimension, which `what` cannot shard.

    Raises:
        InputError: there is one.
    """
    if name := next((name for name, p in model.named_parameters() if not whole_shape(p)), None):
        raise InputError(
            f"{name} of {type(model).__name__} is a scalar parameter, which {what} cannot shard: give it one dimension,"
            " nn.Parameter(torch.ones(1)), or set trainer.strategy to ddp"
        )


def by_layout(items: Iterable[Any], tensor: Callable[[Any], Tensor] = lambda item: item) -> list[list[Any]]:
    """`items` in groups of equal layout, in the order of first appearance."""
    items = list(items)
    if not any(isinstance(tensor(item), DTensor) for item in items):
        return [items] if items else []
    groups: dict[Hashable, list[Any]] = defaultdict(list)
    for item in items:
        groups[layout(tensor(item))].append(item)
    return list(groups.values())


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """() the joint 2-norm of tensors of any layouts: a plain tensor, equal on every rank, not read on the host."""
    norms = [torch.nn.utils.get_total_norm(group) for group in by_layout(tensors)]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor | None:
    """Scale all gradients in place so that their joint 2-norm is at most `max_norm`; None or 0 only measures.

    Own code because Lightning's clipping refuses a fused AdamW under bf16-mixed (2.6.6), hides the norm, and fails
    where parameters live on different meshes.

    Returns:
        () the norm before clipping, on the gradients' device: reading it on the host would be a device sync. None where
        no parameter holds a gradient, because the strategy keeps and clips them itself (DeepSpeed).
    """
    parameters = [p for p in parameters if p.grad is not None]
    if not parameters:
        return None
    norm = total_norm(p.grad for p in parameters if p.grad is not None)
    if max_norm:
        for group in by_layout(parameters, lambda p: p.grad):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm
