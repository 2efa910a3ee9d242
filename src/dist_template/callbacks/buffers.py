"""Buffers and the numerics guard: restores those that a skipped step has written, on the device,
and names the tensors that are not finite.

BatchNorm's forward pass updates its running statistics, so a batch with a NaN leaves NaN in them
although the optimizer skips the step: from then on every evaluation is NaN. A skipped step leaves
buffers as they were before its first micro-batch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from .. import processes
from ..cluster.hang import rank_ranges
from ..compat.torch import is_persistent, num_writes
from ..layout import local_shard

MOST_INTEGERS = 2**16  # elements: a counter or a small table, not the packed weights of a layer


class StepBuffers:
    """Copies of the buffers that the forward pass writes, from before the current step.

    Which ones these are is observed: the first step keeps copies of all, and reads on the host
    which differ after it. A buffer that is first written later is kept from the next step on."""

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if _can_be_kept(buffer):
                    self._places.append((owner, name))
        self._written: list[tuple[nn.Module, str]] | None = None  # None: before the first step
        self._seen: list[tuple[int, int]] = []  # of each place: object and version
        self._kept: list[tuple[nn.Module, str, Tensor]] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the buffers; call it before a step's first micro-batch."""
        places = self._places if self._written is None else self._written
        self._kept = []
        for owner, name in places:
            buffer = _local(owner, name)
            if buffer is not None:
                self._kept.append((owner, name, buffer.clone()))
        self._seen = [_version(*place) for place in self._places]

    @torch.no_grad()
    def restore_where(self, skipped: Tensor) -> None:
        """Restores the buffers where `skipped`, () on the device, is 1; call it after the step's
        last backward pass. No device sync but in the first step."""
        if self._written is None:
            self._kept = [each for each in self._kept if _differs(*each)]
            self._written = [(owner, name) for owner, name, _ in self._kept]
        groups: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for owner, name, before in self._kept:
            now = _local(owner, name)
            if now is not None and _is_like(now, before):  # not a queue that grows
                groups[now.device, now.dtype].append((now, before))
        for (device, _), pairs in groups.items():  # three kernels, and a copy of each buffer
            now = torch.cat([each.flatten() for each, _ in pairs])
            before = torch.cat([each.flatten() for _, each in pairs])
            right = torch.where(skipped.to(device) > 0, before, now)
            parts = right.split([tensor.numel() for tensor, _ in pairs])
            for (tensor, _), part in zip(pairs, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        self._add_newly_written()

    def _add_newly_written(self) -> None:
        """Adds all buffers of modules that wrote one: torch (2.13) counts BatchNorm's writes of its
        counter as changes in place, and not those of its statistics."""
        written = self._written
        if written is None:
            return
        owners = []
        for (owner, name), seen in zip(self._places, self._seen, strict=True):
            if (owner, name) not in written and _version(owner, name) != seen:
                owners.append(owner)
        if not owners:
            return
        for owner, name in self._places:
            if owner in owners and (owner, name) not in written:
                written.append((owner, name))


def _local(owner: nn.Module, name: str) -> Tensor | None:
    """Returns a buffer as it is now: a module may have replaced it by another tensor, or None."""
    buffer = getattr(owner, name, None)
    if not isinstance(buffer, Tensor):
        return None
    return local_shard(buffer.detach())


def _differs(owner: nn.Module, name: str, before: Tensor) -> bool:
    now = _local(owner, name)
    return now is None or not _is_like(now, before) or not torch.equal(now, before)


def _is_like(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _version(owner: nn.Module, name: str) -> tuple[int, int]:
    buffer = getattr(owner, name, None)
    return id(buffer), num_writes(buffer) if isinstance(buffer, Tensor) else 0


def _can_be_kept(buffer: Tensor) -> bool:
    if buffer.is_inference():
        return False
    is_integer = not buffer.is_floating_point() and not buffer.is_complex()
    return not is_integer or buffer.numel() <= MOST_INTEGERS


def saved_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's shards by name."""
    return {name: local_shard(each).detach() for name, each in module.named_parameters()}


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's shards of the floating-point buffers that a checkpoint has, by name."""
    found = {}
    for name, buffer in module.named_buffers():
        owner, _, key = name.rpartition(".")
        if buffer.is_floating_point() and is_persistent(module.get_submodule(owner), key):
            found[name] = local_shard(buffer.detach())
    return found


def infinite_buffers(module: nn.Module) -> set[str]:
    """Returns the names of buffers that have infinities and no NaN, such as a mask."""
    found = set()
    for name, tensor in saved_buffers(module).items():
        if not tensor.isfinite().all() and not tensor.isnan().any():
            found.add(name)
    return found


def is_finite(tensor: Tensor) -> Tensor:
    """Returns () bool on the tensor's device."""
    # No sum is finite if a term is not; the largest value takes a CPU eight times as long.
    return tensor.sum(dtype=torch.float32).isfinite()


def damaged(module: nn.Module, ignored: set[str]) -> str:
    """Names the first tensor that is not finite, its ranks, and how many more there are.
    Collective."""
    found: list[tuple[int, str, str]] = []
    for kind, tensors in (("weight", saved_parameters(module)), ("buffer", saved_buffers(module))):
        for place, (name, tensor) in enumerate(tensors.items()):
            if name not in ignored and not is_finite(tensor):
                found.append((place, kind, name))
    of_ranks = processes.from_all_ranks(found)
    everywhere = set().union(*of_ranks)
    first = min(everywhere)
    _, kind, name = first
    ranks = [rank for rank, of_rank in enumerate(of_ranks) if first in of_rank]
    where = "" if processes.is_alone() else f" of rank {rank_ranges(ranks)}"
    sentence = f"the {kind} {name}{where} is not finite"
    more = len({name for _, _, name in everywhere}) - 1
    if more == 1:
        return f"{sentence}, and so is 1 more tensor"
    if more:
        return f"{sentence}, and so are {more} more tensors"
    return sentence
