"""Gathers unsharded weights, exchanges plain values between ranks, and ties shared parameters."""

import hashlib
import os
import secrets
from collections import defaultdict
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["broadcast", "from_all_ranks", "gather"]

CHUNK = 1 << 26  # bytes of a file that ranks exchange at once
T = TypeVar("T")
Ties = list[list[tuple[nn.Module, str]]]  # the owners and names of each shared parameter


def rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    return rank() == 0


def is_alone() -> bool:
    return world_size() == 1


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


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns every rank's `value` (plain types), by rank. Collective over `group`; None: all."""
    values: list[T] = [value] * world_size(group)
    if dist.is_initialized():
        dist.all_gather_object(values, value, group=group)
    return values


def to_rank_zero(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns every rank's `value` (plain types), by rank, on rank 0 of `group`; [] on the others.
    Collective. At thousands of ranks `from_all_ranks` would send all values to each of them."""
    if not dist.is_initialized():
        return [value]
    values = [value] * world_size(group) if rank(group) == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def distinct(value: T) -> dict[int, T]:
    """Returns on rank 0 each different `value` by the first rank that has it, {} on the others.
    Collective. Ranks send a digest, and of the ranks with equal values one sends the value."""
    first: dict[str, int] = {}
    for number, digest in enumerate(to_rank_zero(hashlib.sha256(repr(value).encode()).hexdigest())):
        first.setdefault(digest, number)
    found = {0: value} if is_rank_zero() else {}
    for number in broadcast([*first.values()])[1:]:
        if is_rank_zero():
            box = [value]
            dist.recv_object_list(box, number)
            found[number] = box[0]
        elif number == rank():
            dist.send_object_list([value], 0)
    return found


def peers(folder: Path, group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the ranks that see the same `folder`, by a link in it that its first rank makes: all
    if it is shared, one node's if it is on the node's own disk. Collective over `group`."""
    if world_size(group) == 1:
        return [0]
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # a link, because its content is there at once
        (folder / ".disk").symlink_to(secrets.token_hex(8))
    of_ranks = from_all_ranks(os.readlink(folder / ".disk"), group)
    return [number for number, disk in enumerate(of_ranks) if disk == of_ranks[rank(group)]]


def pass_file(file: Path, size: int, source: int, is_wanted: bool) -> None:
    """Copies a file from the disk of the rank `source` to the disks of the ranks that want it.
    Collective."""
    for start in range(0, max(size, 1), CHUNK):
        box = [b""]
        if rank() == source:
            with file.open("rb") as stream:
                stream.seek(start)
                box = [stream.read(CHUNK)]
        dist.broadcast_object_list(box, src=source)
        if is_wanted:
            with file.open("ab" if start else "wb") as stream:
                stream.write(box[0])


def broadcast(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Returns the `value` of rank 0 of `group`, of plain types, on every rank."""
    box = [value]
    if world_size(group) > 1:
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


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
