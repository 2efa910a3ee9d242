"""One buffer for training metrics: sums stay on the device, and are read once, at log steps.

`self.log` in a training step costs some 350 µs of CPU a value and can read the device each step; adding to this
buffer is one device addition. Validation keeps `self.log`, so that ModelCheckpoint and schedulers can monitor it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class MetricBuffer:
    """What was measured since the last `read`: means over time and ranks, and numbers that ranks know on the host.

    Every rank must add the same names between two reads: they travel as one vector.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # each (): sum of value x weight
        self._weights: dict[str, float] = {}
        self._host: dict[str, float] = {}
        self._own: dict[str, float] = {}
        self.latest: dict[str, float] = {}  # what the last log step wrote
        self.of_ranks: dict[str, list[float]] = {}  # as `put_of_rank` had it at the newest `read`; index: rank
        self.newest: dict[str, Tensor] = {}  # what was added last, on this rank's device, for callbacks to act upon

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Add a scalar tensor without reading it."""
        self.newest[name] = value.detach()
        value = value.detach() if weight == 1.0 else value.detach() * weight
        if name in self._sums:
            self._sums[name] += value
            self._weights[name] += weight
        else:
            self._sums[name] = value.to(torch.float32, copy=True)  # the copy is ours to add to
            self._weights[name] = weight

    def put(self, name: str, value: float) -> None:
        """Note what this rank knows on the host (a time, a count); rank 0's newest value is written, not reduced."""
        self._host[name] = value

    def put_of_rank(self, name: str, value: float) -> None:
        """Note what differs between ranks; `read` leaves all ranks' newest values in `of_ranks`."""
        self._own[name] = value

    def read(self, all_gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Mean over ranks and time of every metric, then empty: one collective, one device-to-host transfer.

        Args:
            all_gather: (n,) of each rank to (ranks, n), on all of them.
        """
        host, self._host = self._host, {}
        own, self._own = self._own, {}
        if not self._sums:
            return host
        sums = torch.stack(list(self._sums.values()))  # (metrics,)
        known = torch.tensor([*self._weights.values(), *own.values()], dtype=sums.dtype)
        vector = torch.cat([sums, known.to(sums.device, non_blocking=True)])
        ranks = all_gather(vector).reshape(-1, len(vector)).tolist()
        num = len(self._sums)
        totals = [sum(column) for column in zip(*(rank[: 2 * num] for rank in ranks), strict=True)]
        means = {name: s / w for name, s, w in zip(self._sums, totals[:num], totals[num:], strict=True)}
        self.of_ranks = {name: [rank[2 * num + i] for rank in ranks] for i, name in enumerate(own)}
        self._sums.clear()
        self._weights.clear()
        return means | host
