"""Tensors in a checkpoint's files: each rank reads the slices that it needs, and copies them into
its shard.

A format's `read` returns a `Stored` for each tensor with a dimension, or a memory-mapped torch
tensor, which has the same interface: `shape`, `dtype`, and an index of slices. That is the
interface of safetensors' slices too, from which transformers reads a rank's shard."""

import ctypes
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import processes, weights
from ..compat.transformers import shard_for

Box = list[tuple[int, int]]  # first index and end in each dimension


@dataclass
class Stored(ABC):
    """A tensor in files, whose slices are read one by one."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Reads the box of a tuple of slices; `...` reads the full tensor."""
        slices = index if isinstance(index, tuple) else (index,)
        box: Box = [(0, size) for size in self.shape]
        for dimension, part in enumerate(slices if index is not ... else ()):
            start, end, _ = part.indices(self.shape[dimension])
            box[dimension] = start, max(start, end)
        return self.read(box)

    @abstractmethod
    def read(self, box: Box) -> Tensor:
        """Reads a box into new memory."""

    def flat(self, start: int, end: int) -> Tensor:
        """Reads a range of the flattened tensor: the rows around it, if a subclass has no better
        way."""
        width = math.prod(self.shape[1:])
        first = start // width
        rows = self[first : -(-end // width)].reshape(-1)
        return rows[start - first * width : end - first * width]


@dataclass
class Mapped(Stored):
    """A memory-mapped tensor, whose pages are dropped once they are copied."""

    tensor: Tensor

    def read(self, box: Box) -> Tensor:
        result = self.tensor[tuple(slice(*each) for each in box)].clone(
            memory_format=torch.contiguous_format
        )
        drop_pages(self.tensor)
        return result


@dataclass
class Partitioned(Stored):
    """A flattened tensor in partitions of `size` elements in the memory-mapped files of ranks.

    It begins at the element `first` of all ranks' partitions. A rank's partition begins at `offset`
    of the joined tensors `parts(rank)` from the first of `groups` to the last."""

    parts: Callable[[int], list[Tensor]]
    size: int
    first: int = 0
    offset: int = 0
    groups: tuple[int, int | None] = (0, None)

    def read(self, box: Box) -> Tensor:
        (start, end), *rest = box
        width = math.prod(self.shape[1:])
        rows = self.flat(start * width, end * width).view(end - start, *self.shape[1:])
        return rows[(slice(None), *(slice(*each) for each in rest))].contiguous()

    def flat(self, start: int, end: int) -> Tensor:
        result, done = torch.empty(end - start, dtype=self.dtype), 0
        while done < len(result):
            rank, within = divmod(self.first + start + done, self.size)
            length, skipped = min(len(result) - done, self.size - within), self.offset + within
            for part in self.parts(rank)[slice(*self.groups)]:
                piece = part[skipped : skipped + length]
                result[done : done + len(piece)] = piece
                done, length = done + len(piece), length - len(piece)
                skipped = max(0, skipped - len(part))
                drop_pages(part)
            if length:
                raise ValueError(
                    f"rank {rank} has too few elements for a tensor of shape {self.shape}"
                )
        return result


def drop_pages(mapped: Tensor) -> None:
    """Drops the pages of a memory-mapped tensor from this process; they stay in the kernel's cache
    of files."""
    first, end = mapped.data_ptr(), mapped.data_ptr() + mapped.nbytes
    first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    if end > first:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED
        )


def is_scalar(value: object) -> bool:
    """Returns whether a value of an optimizer's state is not sharded: a count of steps."""
    return not getattr(value, "shape", ())


def flat_range(stored: Any, start: int, end: int) -> Tensor:
    """Returns the elements of the flattened tensor from `start` to `end`, which is limited to its
    size."""
    size = math.prod(stored.shape)
    start, end = min(start, size), min(end, size)
    return stored.reshape(-1)[start:end] if isinstance(stored, Tensor) else stored.flat(start, end)


def copy_weights(module: nn.Module, stored: Mapping[str, Any]) -> None:
    """Copies stored tensors by name into `module`, on each rank the slices that it needs. Tensors
    whose names `stored` lacks are unchanged; those that `module` lacks, as in a stage of a
    pipeline, are not read. Collective only where DeepSpeed keeps parameters on NVMe or copies of
    partitions."""
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    for name, value in stored.items():
        if name in tensors and hasattr(value, "shape"):
            copy_shard(tensors[name], value)


@torch.no_grad()
def copy_shard(target: Tensor, stored: Any) -> None:
    """Copies into `target` its slice of a stored tensor: all of it, a DTensor's shard, or a ZeRO-3
    partition."""
    if weights.is_partitioned_by_zero(target):
        _copy_partition(target, stored)
    elif not isinstance(target, DTensor):
        target.copy_(stored[...])
    elif (local := target.to_local()).numel():  # transformers' operation has no shard without rows
        local.copy_(shard_for(target, stored))


def _copy_partition(parameter: Any, stored: Any) -> None:
    shard = parameter.ds_tensor
    if not weights.has_own_partition(parameter):
        with weights.gathered_from_zero(parameter):
            if processes.is_rank_zero():
                parameter.copy_(stored[...])
        return
    values = partition_of(parameter, stored)
    shard.view(-1).copy_(nn.functional.pad(values, (0, shard.numel() - len(values))))
    if parameter.ds_status.name == "AVAILABLE":  # a small parameter, which is not sharded
        parameter.copy_(stored[...])


def partition_of(parameter: Any, stored: Any) -> Tensor:
    """Returns this rank's partition of a stored tensor for a ZeRO-3 parameter, without padding."""
    size, number = parameter.ds_tensor.ds_numel, processes.rank(parameter.ds_process_group)
    return flat_range(stored, number * size, (number + 1) * size)
