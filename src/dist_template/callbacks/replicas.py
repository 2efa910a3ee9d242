"""The replica guard: compares the tensors that several ranks hold, bit by bit.

Data parallelism keeps a copy of each parameter on every rank, tensor parallelism copies of norms
and routers, a pipeline two of a tied embedding. Copies start equal and are stepped with equal
gradients. A gradient that is not reduced, code that depends on the rank, or damaged memory makes
them different models, and neither the loss nor the norm shows it.

    before a comparison    a checksum of each tensor is computed on the device
    one all-reduce         the largest and the smallest checksum of the ranks that hold a tensor
    one read on the host   where they differ, ranks exchange what names the tensor and the ranks
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import chain
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from .. import weights
from ..cluster.hang import rank_ranges
from ..compat.lightning import accumulates
from ..compat.torch import is_persistent
from ..errors import Ended, Exit
from ..layout import local_shard, shard_place
from ..parallel import run_strategy

STEPS = (1, 2, 10)  # of an attempt: what starts after the first steps is seen before it is saved
COLUMNS = 64  # of a tensor's 8-byte words, each with a weight
CHUNK = COLUMNS * 2**18  # elements that are converted at once
NONE_HELD = torch.iinfo(torch.int64).min


class Replicas(Callback):
    """Ends training, with exit code 65, if ranks hold different values of one tensor.

    Compared are parameters, and floating-point buffers that a checkpoint has, after the first,
    second and tenth step of each attempt and before each checkpoint is written; after those steps
    also the moments of torch's optimizers, which differ although a first rate is 0. BatchNorm's
    running statistics are not compared: each rank has its own.

    Args:
        ignore: Tensors that ranks hold differently on purpose: names, or patterns as `teacher.*`.
            "*" turns the comparison off.
    """

    def __init__(self, ignore: list[str] = []) -> None:  # noqa: B006  (it is never modified)
        self.ignore = ignore
        self._positions: dict[int, int] | None = None  # digest of a replica: its place in a check
        self._first_step, self._pending = 0, list(STEPS)
        self._has_warned = False

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._positions, self._pending = None, list(STEPS)
        self._first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        if not self._pending or accumulates(trainer):
            return
        if trainer.global_step - self._first_step >= self._pending[0]:
            self._pending.pop(0)
            self._compare(trainer, pl_module, with_moments=True)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict) -> None:
        self._compare(trainer, pl_module)

    @torch.no_grad()
    def _compare(self, trainer: Any, module: nn.Module, with_moments: bool = False) -> None:
        """Compares the checksums of all ranks. Collective.

        Raises:
            Ended: on all ranks, if a tensor's replicas differ.
        """
        if weights.is_alone() or not run_strategy(trainer.strategy).has_replicas:
            return
        own = dict(self._replicas(trainer, module, with_moments))
        if self._positions is None:
            held = Counter(chain.from_iterable(weights.from_all_ranks([*own])))
            several = sorted(digest for digest, count in held.items() if count > 1)
            self._positions = {digest: place for place, digest in enumerate(several)}
        if not self._positions:
            return
        own = {digest: each for digest, each in own.items() if digest in self._positions}
        device = trainer.strategy.root_device
        largest = torch.full((2, len(self._positions)), NONE_HELD, device=device)
        if own:
            sums = torch.stack([checksum(tensor).to(device) for _, tensor in own.values()])
            places = torch.tensor([self._positions[digest] for digest in own], device=device)
            largest[:, places] = torch.stack([sums, ~sums])  # ~ reverses the order
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        differs = (largest[0] != ~largest[1]) & (largest.amax(0) != NONE_HELD)
        differ = differs.nonzero().flatten().tolist()
        if differ:
            digests = list(self._positions)
            self._report(trainer, own, [digests[place] for place in differ])

    def _replicas(
        self, trainer: Any, module: nn.Module, with_moments: bool
    ) -> Iterator[tuple[int, Any]]:
        """Yields (digest, (name, tensor)); equal digests on two ranks stand for replicas.

        The first and the last stage of a pipeline have a tied parameter under the same name.
        """
        compared = _compared(module)
        if with_moments:
            compared = chain(compared, _moments(trainer, module))
        for name, tensor in compared:
            shard = local_shard(tensor)
            # A quantized tensor may be of a class without bits of its own.
            is_special = shard.is_meta or hasattr(shard, "__tensor_flatten__")
            if is_special or weights.is_partitioned_by_zero(tensor):
                continue
            if any(fnmatchcase(name, each) for each in self.ignore):
                continue
            key = f"{name}{shard_place(tensor)} {tuple(shard.shape)} {shard.dtype}"
            digest = blake2b(key.encode(), digest_size=8).digest()
            yield int.from_bytes(digest, "big"), (name, tensor)

    def _report(self, trainer: Any, own: dict[int, Any], digests: list[int]) -> None:
        """Names the first tensor that differs, and the ranks. Collective."""
        figures = {
            digest: (own[digest][0], int(checksum(own[digest][1])), *_figures(own[digest][1]))
            for digest in digests
            if digest in own
        }
        ranks = weights.from_all_ranks(figures)
        found = [_difference(digest, ranks) for digest in digests]
        found.sort(key=lambda each: (" of " in each[0], each[0]))  # moments last
        name, usual, others, _ = found[0]
        sizes = [size for *_, size in found]
        more = f", and {len(found) - 1} more tensors" if len(found) > 1 else ""
        sentence = (
            f"replicas differ after step {trainer.global_step}: {name} of rank"
            f" {rank_ranges(others)} is not that of rank {rank_ranges(usual)} (by"
            f" {max(sizes):.1g} of its norm){more}."
        )
        causes = (
            " Code that depends on the rank, a gradient that is not summed over the ranks, or"
            " damaged memory does this. List what differs on purpose in replicas.ignore"
        )
        tolerance = _tolerance(trainer.strategy)
        if not all(size <= tolerance for size in sizes):
            saved = " They are not saved; older checkpoints stay."
            raise Ended(Exit.NON_FINITE, f"training stopped: {sentence}{saved}{causes}")
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"{sentence} Kernels that round differently each time do this.{causes}")


def _compared(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors that are equal on all ranks that hold them.

    Of the buffers, counters and random states are not, nor are those that a checkpoint lacks: a
    dynamic rotary embedding has the frequencies of its rank's longest sequence.
    """
    yield from module.named_parameters()
    for prefix, owner in module.named_modules():
        buffers = dict(owner.named_buffers(recurse=False))
        for name, buffer in buffers.items() if "running_mean" not in buffers else ():
            if buffer.is_floating_point() and is_persistent(owner, name):
                yield f"{prefix}.{name}".removeprefix("."), buffer


def _moments(trainer: Any, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the state of torch's optimizers; one of another library may keep a rank's share."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer in trainer.optimizers:
        if type(optimizer).__module__.startswith("torch.optim"):
            for parameter, state in optimizer.state.items():
                for key, value in state.items() if id(parameter) in names else ():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        yield f"{key} of {names[id(parameter)]}", value


def checksum(tensor: Tensor) -> Tensor:
    """Returns () int64 of the bits of this rank's shard; no copy of it, and no rounding.

    It is a weighted sum of 8-byte words. Without weights, two vectors of ones that a first step has
    moved by the learning rate, up in as many places as down, would have the same sum.
    """
    bits = local_shard(tensor).detach().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:
        bits = bits.clone()
    row = COLUMNS * 8
    end = len(bits) // row * row
    sums = bits[:end].view(torch.int64).view(-1, COLUMNS).sum(0)
    rest = nn.functional.pad(bits[end:], (0, row - len(bits) + end)).view(torch.int64)
    return ((sums + rest) * _word_weights(bits.device)).sum()


@functools.cache
def _word_weights(device: torch.device) -> Tensor:
    """Returns (COLUMNS,) odd numbers, the same on all ranks."""
    limit = torch.iinfo(torch.int64).max
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-limit, limit, (COLUMNS,), generator=generator) | 1).to(device)


def _figures(tensor: Tensor) -> tuple[float, list[float]]:
    """Returns the norm of this rank's shard, and sums of its columns.

    The distance of two tensors' sums is about that of the tensors, if their differences have random
    signs, and larger otherwise.
    """
    square, sums = 0.0, [0.0] * COLUMNS
    for part in local_shard(tensor).detach().reshape(-1).split(CHUNK):
        part = nn.functional.pad(part.double(), (0, -len(part) % COLUMNS)).view(-1, COLUMNS)
        square += float(part.square().sum())
        sums = [a + b for a, b in zip(sums, part.sum(0).tolist(), strict=True)]
    return math.sqrt(square), sums


def _difference(digest: int, ranks: list[dict]) -> tuple[str, list[int], list[int], float]:
    """Returns a tensor's name, the ranks with its usual value, the others, and by how much they
    differ, relative to its norm; infinity for what is not a number."""
    held = {rank: figures[digest] for rank, figures in enumerate(ranks) if digest in figures}
    by_sum: dict[int, list[int]] = {}
    for rank, (_, bits, *_) in held.items():
        by_sum.setdefault(bits, []).append(rank)
    usual = max(by_sum.values(), key=len)  # the first of equally many
    others = [rank for rank in held if rank not in usual]
    name, _, norm, sums = held[usual[0]]
    size = max(math.dist(held[rank][3], sums) for rank in others) / (norm or 1.0)
    return name, usual, others, size if math.isfinite(size) else math.inf


def _tolerance(strategy: Any) -> float:
    """Returns how much replicas may differ, relative to their norm: nothing on a CPU."""
    is_exact = strategy.root_device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    return 0.0 if is_exact else run_strategy(strategy).replica_tolerance
