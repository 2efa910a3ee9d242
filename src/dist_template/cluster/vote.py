"""One decision on all ranks from what each of them knows by itself, without a stall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Vote:
    """The maximum over all ranks of a few small numbers, one cast late.

    A cast starts an all-reduce on the CPU and reads the one before, which had a step's time to arrive: nobody waits,
    and every rank reads the same at the same cast. Where training's own group is of a GPU, it has one of its own, and
    making it is a collective too. On a CPU it has none: each of gloo's groups wakes up a hundred times a second.

    Args:
        size: How many numbers, integers of 64 bits.
    """

    def __init__(self, size: int) -> None:
        self._is_alone = not dist.is_initialized()
        shares = self._is_alone or dist.get_backend() == dist.Backend.GLOO
        self._group = None if shares else dist.new_group(backend="gloo")
        self._box = torch.zeros(size, dtype=torch.int64)
        self._work: Any = None

    def cast(self, numbers: Sequence[int]) -> list[int]:
        """Give this rank's numbers; every rank must do so equally often.

        Returns:
            The maxima of the cast before, zeros at the first.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self._work is not None:
            self._work.wait()
        agreed = self._box.numpy().tolist()  # the test that counts device reads counts tensors
        self._box = torch.tensor(numbers, dtype=torch.int64)
        if not self._is_alone:
            self._work = dist.all_reduce(self._box, dist.ReduceOp.MAX, self._group, async_op=True)
        return agreed

    def close(self) -> None:
        """Wait for the last cast: a process that ends with a collective under way may be aborted."""
        if self._work is not None:
            self._work.wait()
        self._work = self._group = None
