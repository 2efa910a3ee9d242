"""The weights of a module on all its ranks: unsharded, gathered on rank 0, and shared ones tied."""

from collections import defaultdict
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .processes import broadcast, distinct, is_rank_zero, rank

__all__ = ["gather"]

Ties = list[list[tuple[nn.Module, str]]]  # the owners and names of each shared parameter


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name: shared ones once, non-persistent buffers too."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


@torch.no_grad()
def gather(module: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of full tensors on rank 0's host, {} on other ranks. Collective. What
    is no tensor, an extra state, is not among them."""
    state_dict = module.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    first: dict[str, int] = {}  # name: the first rank that has it; in a pipeline not always rank 0
    for number, names in broadcast(distinct(list(tensors))).items():
        first = dict.fromkeys(names, number) | first
    state = {}
    for name, tensor in tensors.items():
        full = _unsharded(tensor).detach()
        if is_rank_zero():
            state[name] = full.cpu().clone()
        elif first[name] == rank():
            dist.send_object_list([full.cpu()], 0)
    for name, number in first.items():
        if number and is_rank_zero():
            box = [torch.empty(0)]
            dist.recv_object_list(box, number)
            state[name] = box[0]
    return state


def _unsharded(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if is_partitioned_by_zero(tensor):
        with gathered_from_zero(tensor):
            return tensor.data.clone()
    return tensor


def is_partitioned_by_zero(tensor: Tensor) -> bool:
    """Returns whether `tensor` is a ZeRO-3 parameter: it is empty, its shard is `ds_tensor`."""
    return hasattr(tensor, "ds_tensor")


def gathered_from_zero(parameter: Tensor, owner: int = 0) -> AbstractContextManager[None]:
    """Inside, `parameter` is unsharded; at the end the values of the rank `owner` are partitioned
    again."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=owner)


def has_own_partition(tensor: Any) -> bool:
    """Returns whether a ZeRO-3 parameter has this rank's partition alone, in memory and in its own
    type: not quantized, copied within nodes, or on NVMe. True for any other tensor."""
    if not is_partitioned_by_zero(tensor):
        return True
    shard = tensor.ds_tensor
    return (
        shard.dtype == tensor.dtype
        and tensor.ds_secondary_tensor is None
        and shard.final_location is None
    )


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
