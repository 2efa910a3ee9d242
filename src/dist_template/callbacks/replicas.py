"""The replica guard: compares the tensors that several ranks hold, bit by bit.

A gradient that is not reduced, code that depends on the rank, or damaged memory makes copies of a
parameter different, and neither the loss nor the norm shows it.

A checksum of each tensor is computed on the device; one all-reduce has the largest and the smallest
of the ranks that hold it, and one read on the host says whether they differ. Where they do, ranks
exchange norms and column sums of these tensors, for the sentence that names them."""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import chain
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .. import processes
from ..cluster.hang import rank_ranges
from ..compat.steps import StepCallback
from ..compat.torch import is_persistent
from ..errors import Ended, Exit, InputError
from ..layout import local_shard, shard_of
from ..model.any_module import tracks_metrics
from ..parallel import rank_view

EARLY = 2  # steps of an attempt: the rate of the first one may be 0
COLUMNS = 64  # of a tensor's 8-byte words, each with a weight
NONE_HELD = torch.iinfo(torch.int64).min


class Replicas(StepCallback):
    """Ends training, with exit code 65, if ranks hold different values of one tensor.

    Compared are parameters, and floating-point buffers that a checkpoint has, after the second step
    of each attempt and before each checkpoint is written. BatchNorm's running statistics are not
    compared: each rank's forward pass changes its own.

    The floating-point buffers of a plain LightningModule, BatchNorm's too, are rank 0's in each
    forward pass of training, each evaluation and each checkpoint, under every strategy, as
    DistributedDataParallel by itself has them; except those in `ignore`.

    Args:
        ignore: Tensors that ranks hold differently on purpose: names, or patterns as `teacher.*`.
            "*" turns the comparison off."""

    def __init__(self, ignore: list[str] = []) -> None:  # noqa: B006  (it is never modified)
        self.ignore = ignore
        self._shared: list[int] | None = None  # digests of the replicas
        self._early_step = EARLY
        self._is_early = True  # until that step
        self._has_warned = False
        self._buffers: list[tuple[nn.Module, str]] = []  # that ranks take from rank 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._buffers = []
        # The network of a TrainingModule may be split into stages, whose ranks have other buffers.
        if not processes.is_alone() and not tracks_metrics(pl_module):
            self._buffers = list(self._shared_buffers(pl_module))

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Gives all ranks rank 0's buffers. Collective."""
        groups: dict[Any, list[Tensor]] = defaultdict(list)
        for owner, name in self._buffers:
            buffer = getattr(owner, name, None)
            if isinstance(buffer, Tensor):
                groups[buffer.device, buffer.dtype].append(buffer)
        for buffers in groups.values():
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            dist.broadcast(flat, 0)
            if not processes.is_rank_zero():
                parts = flat.split([buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object, **__: object
    ) -> None:
        if self._buffers:
            self.share_buffers()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.share_buffers()

    on_test_start = on_predict_start = on_validation_start

    def _shared_buffers(self, module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        for prefix, owner in module.named_modules():
            for name, buffer in owner.named_buffers(recurse=False):
                full = f"{prefix}.{name}".removeprefix(".")
                is_ignored = any(fnmatchcase(full, pattern) for pattern in self.ignore)
                is_sharded = isinstance(buffer, DTensor)
                if buffer.is_floating_point() and not is_sharded and not is_ignored:
                    yield owner, name

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._shared = None
        self._early_step = trainer.global_step + EARLY
        self._is_early = True

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        """Names parameters without gradients, for which DDP (torch 2.13) ends the next step with a
        list of numbers."""
        model: Any = trainer.strategy.model
        is_strict = isinstance(model, DistributedDataParallel) and not model.find_unused_parameters
        if not is_strict or model.static_graph or trainer.global_step + EARLY != self._early_step:
            return
        missing = []
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                missing.append(name)
        if missing:
            raise InputError(
                f"DDP needs a gradient of each parameter, and {missing[0]} ({len(missing)} such)"
                " gets none: freeze them where they are made, by requires_grad_(False), or set"
                " trainer.strategy ddp_find_unused_parameters_true"
            )

    def on_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        if not self._is_early:
            return
        if trainer.global_step >= self._early_step:  # a batch may take several steps
            self._is_early = False
            self._compare(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: object
    ) -> None:
        self._compare(trainer, pl_module)

    @torch.no_grad()
    def _compare(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Compares the checksums of all ranks. Collective. Raises Ended on all ranks if a tensor's
        replicas differ."""
        if processes.is_alone() or not rank_view(trainer.strategy).has_replicas:
            return
        self.share_buffers()  # the newest forward pass has changed each rank's own
        held = self._replicas(module)
        if self._shared is None:
            counts = Counter(chain.from_iterable(processes.to_rank_zero(list(held))))
            on_several = sorted(digest for digest, count in counts.items() if count > 1)
            self._shared = processes.broadcast(on_several)
        shared = self._shared
        if not shared:
            return
        device = trainer.strategy.root_device
        largest = torch.full((2, len(shared)), NONE_HELD, device=device)
        places = [place for place, digest in enumerate(shared) if digest in held]
        if places:
            sums = torch.stack([checksum(held[shared[place]][1]).to(device) for place in places])
            # ~ reverses the order of integers: the largest ~sum is of the smallest sum.
            largest[:, torch.tensor(places, device=device)] = torch.stack([sums, ~sums])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        differs = (largest[0] != ~largest[1]) & (largest.amax(0) != NONE_HELD)
        differ = differs.nonzero().flatten().tolist()
        if differ:
            self._report(trainer, held, [shared[place] for place in differ])

    def _replicas(self, module: nn.Module) -> dict[int, tuple[str, Tensor]]:
        """Returns names and tensors by digest; equal digests on two ranks stand for replicas. The
        first and the last stage of a pipeline have a tied parameter under the same name."""
        found = {}
        for name, tensor in _compared(module):
            shard, place = shard_of(tensor)
            # A quantized tensor may be of a class without bits of its own.
            is_special = shard.is_meta or hasattr(shard, "__tensor_flatten__")
            is_ignored = any(fnmatchcase(name, pattern) for pattern in self.ignore)
            if is_special or is_ignored or place is None:
                continue
            key = f"{name}{place} {tuple(shard.shape)} {shard.dtype}"
            digest = blake2b(key.encode(), digest_size=8).digest()
            found[int.from_bytes(digest, "big")] = (name, tensor)
        return found

    def _report(
        self, trainer: L.Trainer, held: dict[int, tuple[str, Tensor]], digests: list[int]
    ) -> None:
        """Names the first tensor that differs, and the ranks. Collective."""
        local = {}
        for digest in digests:
            if digest in held:
                name, tensor = held[digest]
                local[digest] = (name, *_figures_of(tensor))
        ranks = processes.from_all_ranks(local)
        size, found = 0.0, []
        for digest in digests:
            by_sum: dict[int, list[int]] = {}
            for rank, of_rank in enumerate(ranks):
                if digest in of_rank:
                    by_sum.setdefault(of_rank[digest][1], []).append(rank)
            usual = max(by_sum.values(), key=len)  # the first of equally many
            others = sorted(set().union(*by_sum.values()) - set(usual))
            name, _, norm, column_sums = ranks[usual[0]][digest]
            if not norm:
                norm = 1.0
            for rank in others:
                distance = math.dist(ranks[rank][digest][3], column_sums) / norm
                if not math.isfinite(distance):
                    distance = math.inf
                size = max(size, distance)
            found.append((name, usual, others))
        name, usual, others = min(found)
        more = f", and {len(found) - 1} more tensors" if len(found) > 1 else ""
        sentence = (
            f"replicas differ after step {trainer.global_step}: {name} of rank"
            f" {rank_ranges(others)} differs from rank {rank_ranges(usual)} (by {size:.1g} of its"
            f" norm){more}."
        )
        causes = (
            " Code that depends on the rank, a gradient that is not summed over the ranks, or"
            " damaged memory does this. List what differs on purpose in replicas.ignore"
        )
        tolerance = 0.0
        is_cpu = trainer.strategy.root_device.type == "cpu"
        if not is_cpu and not torch.are_deterministic_algorithms_enabled():
            tolerance = rank_view(trainer.strategy).replica_tolerance
        if size > tolerance:
            saved = " They are not saved; older checkpoints stay."
            raise Ended(Exit.NON_FINITE, f"training stopped: {sentence}{saved}{causes}")
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"{sentence} Kernels that round differently each time do this.{causes}")


def _compared(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors that are equal on all ranks that hold them.

    Counters, random states and buffers that a checkpoint lacks are not: a dynamic rotary embedding
    depends on the data.
    """
    yield from module.named_parameters()
    for prefix, owner in module.named_modules():
        buffers = dict(owner.named_buffers(recurse=False))
        if "running_mean" in buffers:
            continue
        for name, buffer in buffers.items():
            if buffer.is_floating_point() and is_persistent(owner, name):
                yield f"{prefix}.{name}".removeprefix("."), buffer


def checksum(tensor: Tensor) -> Tensor:
    """Returns () int64 of the bits of this rank's shard; no copy of it, and no rounding. It is a
    sum of 8-byte words with weights: without, vectors of ones that a first step has moved up and
    down would have the same sum."""
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


def _figures_of(tensor: Tensor) -> tuple[int, float, list[float]]:
    """Returns the checksum, the norm and column sums of a rank's shard. The distance of two ranks'
    column sums is about the tensors' distance if their differences have random signs, and larger
    otherwise."""
    flat = local_shard(tensor).detach().reshape(-1).double()
    columns = nn.functional.pad(flat, (0, -len(flat) % COLUMNS)).view(-1, COLUMNS)
    return int(checksum(tensor)), float(flat.norm()), columns.sum(0).tolist()
