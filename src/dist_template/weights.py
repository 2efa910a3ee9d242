"""Distributes full (unsharded) weights from rank 0 over the ranks, and gathers them there.

Rank 0 builds the model, and every other rank builds it on torch's meta device, without memory; then
each tensor is sent from rank 0 to the ranks that need it. So a node's host memory holds one model,
and the starting weights do not depend on the strategy.

torch's `set_model_state_dict(broadcast_from_rank0=True)` does not support non-persistent buffers,
the interleaved shards of transformers' packed plans, or DeepSpeed's partitions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_rank_zero() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name: shared ones once, non-persistent buffers too."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def take(module: nn.Module) -> dict[str, Tensor]:
    """Moves `module` to the meta device; returns its weights on rank 0, {} on other ranks."""
    full = {}
    if is_rank_zero():
        full = {name: tensor.detach() for name, tensor in named_tensors(module).items()}
    with kept_ties(module):
        module.to("meta")
    return full


def spread(module: nn.Module, device: torch.device) -> None:
    """Broadcasts rank 0's weights: every rank has the full ones afterwards."""
    if not is_alone():
        fill(module, take(module), device)


@torch.no_grad()
def fill(module: nn.Module, full: dict[str, Tensor], device: torch.device) -> None:
    """Allocates a meta-device module on `device` and loads rank 0's `full` tensors into it."""
    with kept_ties(module):
        module.to_empty(device=device)
    load(module, full)


@torch.no_grad()
def load(module: nn.Module, full: dict[str, Tensor]) -> None:
    """Copies rank 0's `full` tensors by name into `module`, each rank its shard. Collective.

    Tensors whose names `full` lacks are unchanged; those that `module` lacks are not kept, as in a
    stage of a pipeline. `full` of other ranks is ignored.
    """
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    outlines = [(n, outline(each)) for n, each in full.items() if isinstance(each, Tensor)]
    for name, like in broadcast(outlines):
        copy_part(tensors.get(name), full.get(name), like)


def outline(tensor: Tensor) -> Tensor:
    """Returns a tensor without values, on the meta device, of `tensor`'s full shape and type."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@torch.no_grad()
def gather(module: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of full tensors on rank 0's host, {} on other ranks. Collective."""
    own = module.state_dict(keep_vars=True)
    first: dict[str, int] = {}  # name: the first rank that has it; in a pipeline not always rank 0
    for rank, names in enumerate(from_all_ranks(list(own))):
        first = dict.fromkeys(names, rank) | first
    state = {}
    for name, tensor in own.items():
        full = _full(tensor).detach()
        if is_rank_zero():
            state[name] = full.cpu().clone()
        elif first[name] == dist.get_rank():
            dist.send_object_list([full.cpu()], 0)
    for name, rank in first.items():
        if rank and is_rank_zero():
            box: list[Any] = [None]
            dist.recv_object_list(box, rank)
            state[name] = box[0]
    return state


def from_all_ranks(value: Any, group: Any = None) -> list[Any]:
    """Returns every rank's `value` (plain types), by rank. Collective over `group`; None: all."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any) -> Any:
    """Returns rank 0's `value`, of plain types, on every rank."""
    if is_alone():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _full(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if is_partitioned_by_zero(tensor):
        with _gathered_from_zero(tensor):
            return tensor.data.clone()
    return tensor


def copy_part(target: Tensor | None, full: Tensor | None, like: Tensor) -> None:
    """Copies rank 0's `full` into `target`, which is this rank's shard of it; None: it has none.

    `like` is its outline, on every rank.
    """
    if target is None:
        tensor_from_rank_zero(full, like)
        return
    if is_partitioned_by_zero(target):
        with _gathered_from_zero(target):
            if full is not None:
                target.copy_(full)
        return
    received = tensor_from_rank_zero(full, like)
    if not isinstance(target, DTensor):
        target.copy_(received)
    elif (own := target.to_local()).numel():  # transformers' operation has no shard without rows
        own.copy_(_shard(received, target))


def _shard(full: Tensor, like: DTensor) -> Tensor:
    """Returns this rank's shard of `full`, with the placements of `like`."""
    from transformers.distributed.sharding_utils import (
        DtensorShardOperation,
    )  # supports interleaved shards

    shard = DtensorShardOperation(like).shard_tensor(full)
    assert shard is not None  # it is None for single experts only
    return shard


def tensor_from_rank_zero(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Returns rank 0's `tensor` on all ranks, with `like`'s shape and type, on `group`'s device."""
    on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
    own = torch.device("cpu") if like.is_meta else like.device
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else own
    if tensor is None:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    tensor = tensor.to(device=device, dtype=like.dtype).contiguous()
    if not is_alone():
        dist.broadcast(tensor, src=0)
    return tensor


def is_partitioned_by_zero(tensor: Tensor) -> bool:
    """Returns whether `tensor` is a ZeRO-3 parameter: it is empty, its shard is `ds_tensor`."""
    return hasattr(tensor, "ds_tensor")


def _gathered_from_zero(parameter: Tensor) -> AbstractContextManager:
    """Inside, `parameter` is unsharded; at the end rank 0's values are partitioned again."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


Ties = list[list[tuple[nn.Module, str]]]  # the owners and names of each shared parameter


def find_ties(module: nn.Module) -> Ties:
    """Returns the owners and names of every parameter that has more than one."""
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            owners[id(parameter)].append((owner, name))
    return [found for found in owners.values() if len(found) > 1]


def tie(ties: Ties) -> None:
    """Shares the first owner's parameter of each tie with the other owners."""
    for (first, first_name), *others in ties:
        for owner, name in others:
            setattr(owner, name, getattr(first, first_name))


def untie(ties: Ties) -> None:
    """Gives each owner a parameter of its own."""
    for _, *others in ties:
        for owner, name in others:
            setattr(owner, name, nn.Parameter(getattr(owner, name).detach().clone()))


@contextmanager
def kept_ties(module: nn.Module) -> Generator[None]:
    """Restores shared parameters at the end: a move to or from the meta device separates them."""
    ties = find_ties(module)
    yield
    tie(ties)
