"""One buffer for training metrics: sums stay on the device, and are read once, at log steps.

`self.log` in a training step costs some 350 µs of CPU a value and can read the device each step; adding to this
buffer is one device addition. Validation keeps `self.log`, so that ModelCheckpoint and schedulers can monitor it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class MetricBuffer:
    """Weighted means of named scalars since the last `read`.

    Every rank must add the same names between two reads: they are reduced as one vector.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # each (): sum of value x weight
        self._weights: dict[str, float] = {}
        self._host: dict[str, float] = {}
        self.latest: dict[str, float] = {}  # what the last log step wrote, for callbacks to show
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
        """Note what this rank knows on the host (a time, a count); the newest value is written, not reduced."""
        self._host[name] = value

    def read(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Mean over ranks and time of every metric, then empty: one collective, one device-to-host transfer."""
        host, self._host = self._host, {}
        if not self._sums:
            return host
        sums = torch.stack(list(self._sums.values()))  # (metrics,)
        weights = torch.tensor(list(self._weights.values()), dtype=sums.dtype).to(sums.device, non_blocking=True)
        sums, weights = all_reduce_sum(torch.stack([sums, weights])).tolist()
        means = {name: s / w for name, s, w in zip(self._sums, sums, weights, strict=True)}
        self._sums.clear()
        self._weights.clear()
        return means | host
