"""Whole weights, and each rank's part of them.

A model is built on rank 0, and as a skeleton without memory (torch's meta device) on every other rank; its tensors then
go from rank 0 to wherever they belong, one by one. So a node's host memory holds one model, however many ranks the node
has, and the starting weights do not depend on the strategy.

torch's `set_model_state_dict(broadcast_from_rank0=True)` does this for plain and evenly sharded tensors; it knows
neither non-persistent buffers, nor the interleaved shards of transformers' packed plans, nor DeepSpeed's partitions.
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
    """Parameters and buffers by name, shared ones once, buffers that no checkpoint holds too."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def take(module: nn.Module) -> dict[str, Tensor]:
    """Take `module`'s weights out of it: what it held on rank 0, nothing elsewhere. It is a skeleton afterwards."""
    whole = {name: tensor.detach() for name, tensor in named_tensors(module).items()} if is_rank_zero() else {}
    with kept_ties(module):
        module.to("meta")
    return whole


def spread(module: nn.Module, device: torch.device) -> None:
    """Whole weights on every rank, from rank 0, which alone has them."""
    if not is_alone():
        fill(module, take(module), device)


@torch.no_grad()
def fill(module: nn.Module, whole: dict[str, Tensor], device: torch.device) -> None:
    """Give a skeleton memory on `device`, and in it each rank's part of rank 0's `whole` tensors."""
    with kept_ties(module):
        module.to_empty(device=device)
    load(module, whole)


@torch.no_grad()
def load(module: nn.Module, whole: dict[str, Tensor]) -> None:
    """Copy rank 0's `whole` tensors, by name, into `module`'s, each rank its part; names that `whole` lacks stay.

    Collective; the other ranks' `whole` is not looked at.
    """
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    for name in broadcast([name for name in tensors if name in whole]):
        copy_part(tensors[name], whole.get(name))


@torch.no_grad()
def gather(module: nn.Module) -> dict[str, Tensor]:
    """`module`'s state dict of whole tensors on the host on rank 0, nothing elsewhere. Collective."""
    whole = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        full = _whole(tensor)
        if is_rank_zero():
            whole[name] = full.detach().cpu().clone()
    return whole


def from_all_ranks(value: Any, group: Any = None) -> list[Any]:
    """Every rank's `value`, of plain types, by rank. Collective over `group`; None: all."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any) -> Any:
    """Rank 0's `value`, of plain types, on every rank."""
    if is_alone():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if is_partitioned_by_zero(tensor):
        with _gathered_from_zero(tensor):
            return tensor.data.clone()
    return tensor


def copy_part(target: Tensor, whole: Tensor | None) -> None:
    """Copy rank 0's `whole` into `target`, which holds this rank's part of it."""
    if is_partitioned_by_zero(target):
        with _gathered_from_zero(target):
            if whole is not None:
                target.copy_(whole)
        return
    received = tensor_from_rank_zero(whole, target)
    if isinstance(target, DTensor):
        target.to_local().copy_(_part(received, target))
    else:
        target.copy_(received)


def _part(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's shard of `whole`, placed as `like` is."""
    from transformers.distributed.sharding_utils import DtensorShardOperation  # knows interleaved shards

    part = DtensorShardOperation(like).shard_tensor(whole)
    assert part is not None  # it is None for single experts only
    return part


def tensor_from_rank_zero(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Rank 0's `tensor` on every rank, of the shape and type of `like`, on a device that the process group reaches."""
    on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else like.device
    if tensor is None:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    tensor = tensor.to(device=device, dtype=like.dtype).contiguous()
    if not is_alone():
        dist.broadcast(tensor, src=0)
    return tensor


def is_partitioned_by_zero(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter under ZeRO-3: it is empty, and its part lies in `ds_tensor`."""
    return hasattr(tensor, "ds_tensor")


def _gathered_from_zero(parameter: Tensor) -> AbstractContextManager:
    """Inside, `parameter` is whole; what rank 0 wrote into it is partitioned again at the end."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


Ties = list[list[tuple[nn.Module, str]]]  # where each shared parameter is found


def find_ties(module: nn.Module) -> Ties:
    """The places of every parameter that is in more than one."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            places[id(parameter)].append((owner, name))
    return [found for found in places.values() if len(found) > 1]


def tie(ties: Ties) -> None:
    """Make what is in the first place of each tie the parameter of all its places."""
    for (first, first_name), *others in ties:
        for owner, name in others:
            setattr(owner, name, getattr(first, first_name))


def untie(ties: Ties) -> None:
    """Give each place a parameter of its own."""
    for _, *others in ties:
        for owner, name in others:
            setattr(owner, name, nn.Parameter(getattr(owner, name).detach().clone()))


@contextmanager
def kept_ties(module: nn.Module) -> Generator[None]:
    """Parameters that were one object before are one object after: moving to or from meta would make them two."""
    ties = find_ties(module)
    yield
    tie(ties)
