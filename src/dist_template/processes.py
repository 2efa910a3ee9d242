"""The processes of a training: this one's rank, and plain values that ranks exchange."""

import hashlib
from typing import TypeVar

import torch.distributed as dist

__all__ = ["broadcast", "from_all_ranks"]

T = TypeVar("T")


def rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    return rank() == 0


def is_alone() -> bool:
    return world_size() == 1


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


def broadcast(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Returns the `value` of rank 0 of `group`, of plain types, on every rank."""
    box = [value]
    if world_size(group) > 1:
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
