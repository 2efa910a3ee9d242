"""What a micro-batch's sum of losses is divided by: how many tokens count in its global batch, over all ranks.

Every strategy averages over ranks and accumulation, so a sum of losses divided by the mean number per rank and
micro-batch becomes the mean over the global batch's counted tokens, wherever they are. It takes one collective of one
number per optimizer step, which is begun a step early: nobody waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Window(NamedTuple):
    """The micro-batches of an optimizer step, on this rank.

    Args:
        tokens: How many of their labels count.
        following: The same of the next step's; None: this is the last.
        is_first: Of an iteration over the data.
    """

    tokens: int
    following: int | None
    is_first: bool


class TokensOfRanks:
    """The mean of `Window.tokens` over ranks, a collective that all ranks begin at the same windows."""

    def __init__(self) -> None:
        self._coming: tuple[Tensor, Any] | None = None

    def mean(self, window: Window, device: torch.device) -> Tensor:
        """() on `device`, float32."""
        if window.is_first or self._coming is None:
            self._coming = _sum_over_ranks(window.tokens, device)
        total, work = self._coming
        if work is not None:
            work.wait()  # on a GPU the stream waits, not the host
            total /= dist.get_world_size()
        self._coming = None if window.following is None else _sum_over_ranks(window.following, device)
        return total

    def close(self) -> None:
        """Wait for what has been begun: a process that ends with a collective under way may be aborted."""
        coming, self._coming = self._coming, None
        if coming and coming[1]:
            coming[1].wait()


def _sum_over_ranks(tokens: int, device: torch.device) -> tuple[Tensor, Any]:
    """Not by Lightning's `strategy.reduce`, which waits at a barrier first (2.6.6)."""
    total = torch.full((), float(tokens), device=device)
    return total, dist.all_reduce(total, async_op=True) if dist.is_initialized() else None
