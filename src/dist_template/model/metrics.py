"""A buffer for training metrics: they stay on the device and are read once, at log steps.

`self.log` in a training step takes about 350 µs of CPU per value and may wait for the device.
Validation uses it, so that ModelCheckpoint and schedulers can monitor its metrics."""

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from operator import truediv

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import InputError
from ..parallel import rank_view

NOT_COUNTED = -100  # a label that cross_entropy ignores
FOLD = 64  # values of a metric are summed when they are so many; each takes 512 bytes of a GPU


class MetricBuffer:
    """Collects metrics between two calls of `read`, which returns their means over time and ranks.
    Every rank must add the same names between two reads, unless the ranks `agree`."""

    def __init__(self) -> None:
        self._added: dict[str, list[Tensor]] = {}  # values, each ()
        self._num_added: dict[str, int] = defaultdict(int)
        self._host: dict[str, float] = {}
        self._of_rank: dict[str, float] = {}
        self._counts: dict[str, Tensor] = {}
        self.latest: dict[str, float] = {}  # what the last log step wrote
        self.of_ranks: dict[str, list[float]] = {}  # of `put_of_rank`, by rank, at the newest read
        self.totals: dict[str, list[float]] = {}  # of `put_counts`, over all ranks, likewise
        # What was added last, on this rank's device, for callbacks to act upon.
        self.newest: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Adds a scalar tensor, unread. Do not change it in place before the next log step."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            given = tuple(value.shape) if isinstance(value, Tensor) else value
            raise InputError(
                f"`track` of {name} was given a {type(value).__name__}, {given}: give it a tensor"
                " of one element, such as `value.mean()` or torch.tensor(number)"
            )
        if isinstance(value, DTensor):  # such as the norm of a sharded weight: a collective
            value = value.full_tensor()
        if value.dim():
            value = value.reshape(())
        if value.untyped_storage().nbytes() > value.nbytes:
            value = value.detach().clone()  # a view would keep the full tensor in memory
        elif value.requires_grad:
            value = value.detach()
        self.newest[name] = value
        added = self._added.setdefault(name, [])
        added.append(value)
        self._num_added[name] += 1
        if len(added) == FOLD:
            added[:] = [self._sum(name)]

    def put(self, name: str, value: float) -> None:
        """Records a host number (time, count): rank 0's newest is logged, without a reduction."""
        self._host[name] = value

    def put_of_rank(self, name: str, value: float) -> None:
        """Records a number per rank; `read` puts all ranks' newest in `of_ranks`. NaN: unknown."""
        self._of_rank[name] = value

    def put_counts(self, name: str, counts: Tensor) -> None:
        """Records counts (n,) on the device; `read` stores their sums over ranks in `totals`."""
        self._counts[name] = counts

    def read(
        self,
        all_reduce: Callable[[Tensor], Tensor],
        device: torch.device,
        rank: int = 0,
        num_ranks: int = 1,
        agree: Callable[[list[str]], list[str]] | None = None,
    ) -> dict[str, float]:
        """Returns the mean over ranks and time of every metric, and clears the buffer, by one
        collective and one device-to-host transfer. Sums are in float64 where the device supports
        it. `all_reduce` maps (n,) of each rank on `device` to their sum; `agree` returns the names
        that any rank has: in a pipeline, only the last stage has a loss. None: all ranks have the
        same."""
        host, self._host = self._host, {}
        of_rank, self._of_rank = self._of_rank, {}
        counts, self._counts = self._counts, {}
        names = list(self._added)
        if agree:
            names = agree(names)
        if not names and not of_rank and not counts:
            return host
        # One vector for the collective: the sums of `names`; their numbers of values; for each name
        # of `of_rank` a number of each rank, of which the others are 0 here; counts.
        dtype = _sum_dtype(device)
        missing = torch.zeros((), dtype=dtype, device=device)
        parts, known = [], []
        for name in names:
            total = self._sum(name) if name in self._added else missing
            parts.append(total.to(device, non_blocking=True).view(1))
            known.append(float(self._num_added[name]))
        for value in of_rank.values():
            known += [0.0] * rank + [value] + [0.0] * (num_ranks - rank - 1)
        parts.append(torch.tensor(known, dtype=dtype).to(device, non_blocking=True))
        for each in counts.values():
            parts.append(each.to(dtype))
        values = iter(all_reduce(torch.cat(parts)).tolist())
        totals = list(islice(values, len(names)))
        numbers = list(islice(values, len(names)))
        means = dict(zip(names, map(truediv, totals, numbers), strict=True))
        self.of_ranks = {name: list(islice(values, num_ranks)) for name in of_rank}
        self.totals = {name: list(islice(values, len(each))) for name, each in counts.items()}
        self._added.clear()
        self._num_added.clear()
        return means | host

    def _sum(self, name: str) -> Tensor:
        """Returns () the sum of the metric's values."""
        added = self._added[name]
        return torch.stack(added).sum(dtype=_sum_dtype(added[0].device))


class SplitMeans:
    """Means per token over a full split: sums over all ranks, divided by tokens of all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: dict[str, Tensor], tokens: Tensor) -> None:
        """Adds a micro-batch's sums, () each, and number of counted tokens; no device sync."""
        for name, value in {"": tokens, **sums}.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach().to(_sum_dtype(value.device))

    def read(self, strategy: Strategy) -> dict[str, float]:
        """Returns means, by one collective and one device-to-host copy; NaN if no token counts."""
        sums = torch.stack(list(self._sums.values()))
        reduced = rank_view(strategy).sum_of_batches(sums)
        totals = dict(zip(self._sums, reduced.tolist(), strict=True))
        tokens = totals.pop("")
        if tokens == 0:
            tokens = math.nan
        return {name: total / tokens for name, total in totals.items()}


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
