"""A buffer for training metrics: they stay on the device and are read once, at log steps.

`self.log` in a training step takes about 350 µs of CPU per value and may wait for the device in
each step; this buffer keeps a reference. Validation uses `self.log`, so that ModelCheckpoint and
schedulers can monitor its metrics.
"""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..compat.torch import version_of
from ..errors import InputError
from ..parallel import run_strategy
from ..project import is_users

FOLD = 64  # values of a metric kept before they are summed; each takes 512 bytes of GPU memory


class MetricBuffer:
    """Collects metrics between two calls of `read`, which returns their means over time and ranks.

    Every rank must add the same names between two reads, which reduce them as one vector, unless
    the ranks `agree`.
    """

    def __init__(self) -> None:
        # value x weight, each (), and its version when it came
        self._kept: dict[str, list[tuple[Tensor, int]]] = {}
        self._weights: dict[str, float] = {}
        self._host: dict[str, float] = {}
        self._own: dict[str, float] = {}
        self._counts: dict[str, Tensor] = {}
        self.latest: dict[str, float] = {}  # what the last log step wrote
        # as `put_of_rank` had it at the newest `read`; index: rank
        self.of_ranks: dict[str, list[float]] = {}
        # as `put_counts` had it at the newest `read`, summed over ranks
        self.totals: dict[str, list[float]] = {}
        # what was added last, on this rank's device, for callbacks to act upon
        self.newest: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Adds a scalar tensor, unread. Do not change it in place before the next log step.

        Raises:
            InputError: it is no tensor of one element.
        """
        if not isinstance(value, Tensor) or value.numel() != 1:
            given = f"tensor {(*value.shape,)}" if isinstance(value, Tensor) else repr(value)
            raise InputError(
                f"{_user_line()}: `track` of {name} was given a {type(value).__name__}, {given}:"
                " give it a tensor of one element, such as `value.mean()` or torch.tensor(number)"
            )
        if isinstance(value, DTensor):  # such as the norm of a sharded weight: a collective
            value = value.full_tensor()
        value = value.reshape(()) if value.dim() else value
        if value.untyped_storage().nbytes() > value.nbytes:
            value = value.detach().clone()  # it would keep all that it is taken of
        elif value.requires_grad:
            value = value.detach()
        self.newest[name] = value
        value = value if weight == 1.0 else value * weight
        kept = self._kept.setdefault(name, [])
        kept.append((value, version_of(value)))
        self._weights[name] = self._weights.get(name, 0.0) + weight
        if len(kept) == FOLD:
            total = self._sums([name])[name]
            kept[:] = [(total, version_of(total))]

    def put(self, name: str, value: float) -> None:
        """Records a host number (time, count): rank 0's newest is logged, without a reduction."""
        self._host[name] = value

    def put_of_rank(self, name: str, value: float) -> None:
        """Records a number per rank; `read` puts all ranks' newest in `of_ranks`. NaN: unknown."""
        self._own[name] = value

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
        """Returns the mean over ranks and time of every metric, and clears the buffer.

        It takes one collective and one device-to-host transfer. Sums are in float64 where the
        device supports it.

        Args:
            all_reduce: Maps (n,) of each rank to their sum.
            device: Device of the collective.
            rank: Rank of this process.
            num_ranks: Number of ranks.
            agree: Returns the names that any rank has: in a pipeline, only the last stage has a
                loss. None: all ranks have the same.
        """
        host, self._host = self._host, {}
        own, self._own = self._own, {}
        counts, self._counts = self._counts, {}
        names = agree(list(self._kept)) if agree else list(self._kept)
        if not (names or own or counts):
            return host
        dtype = _sum_dtype(device)
        nothing = [0.0] * len(own)
        known = [self._weights.get(name, 0.0) for name in names]
        for each in range(num_ranks):
            known += own.values() if each == rank else nothing
        sums = self._sums([name for name in names if name in self._kept])
        missing = torch.zeros((), dtype=dtype, device=device)
        of_names = [sums.get(name, missing) for name in names]
        on_device = [each.to(device, non_blocking=True).view(1) for each in of_names]
        on_device += [
            torch.tensor(known, dtype=dtype).to(device, non_blocking=True),
            *(each.to(dtype) for each in counts.values()),
        ]
        values = iter(all_reduce(torch.cat(on_device)).tolist())
        totals, weights = list(islice(values, len(names))), list(islice(values, len(names)))
        of_ranks = [list(islice(values, len(own))) for _ in range(num_ranks)]
        self.of_ranks = {name: [each[i] for each in of_ranks] for i, name in enumerate(own)}
        self.totals = {name: list(islice(values, len(each))) for name, each in counts.items()}
        means = {name: s / w for name, s, w in zip(names, totals, weights, strict=True)}
        self._kept.clear()
        self._weights.clear()
        return means | host

    def _sums(self, names: list[str]) -> dict[str, Tensor]:
        """Returns the sum () of each metric's values; metrics with equally many values share a GPU
        kernel.

        Raises:
            InputError: a value was changed in place.
        """
        alike: dict[Any, list[str]] = defaultdict(list)
        for name in names:
            kept = self._kept[name]
            if any(version_of(value) != version for value, version in kept):
                raise InputError(
                    f"{name} was changed in place after `self.track`; give it `value.clone()` in"
                    " module.py"
                )
            alike[len(kept), kept[0][0].dtype, kept[0][0].device].append(name)
        sums: dict[str, Tensor] = {}
        for (count, _, device), group in alike.items():
            flat = [value for name in group for value, _ in self._kept[name]]
            values = torch.stack(flat).view(-1, count)
            sums |= zip(group, values.sum(1, dtype=_sum_dtype(device)).unbind(), strict=True)
        return sums


class SplitMeans:
    """Means per token over a full split: sums over all ranks, divided by tokens of all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: dict[str, Tensor], tokens: Tensor) -> None:
        """Adds a micro-batch's sums, () each, and number of counted tokens; no device sync."""
        for name, value in {"": tokens, **sums}.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach().to(_sum_dtype(value.device))

    def read(self, strategy: Any) -> dict[str, float]:
        """Returns means, by one collective and one device-to-host copy; NaN if no token counts."""
        sums = torch.stack([*self._sums.values()])
        tokens, *totals = run_strategy(strategy).sum_of_batches(sums).tolist()
        names = [*self._sums][1:]
        return {n: total / (tokens or math.nan) for n, total in zip(names, totals, strict=True)}


def _user_line() -> str:
    """Returns file:line of the innermost call in the user's code."""
    frames = traceback.extract_stack()
    users = [frame for frame in frames if is_users(frame.filename)] or frames
    return f"{Path(users[-1].filename).name}:{users[-1].lineno}"


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
