"""The training loader: reads the micro-batches of an optimizer step together, and counts their
labels.

Every strategy averages gradients over ranks and micro-batches. A sum of losses divided by the mean
number of counted labels per rank and micro-batch therefore becomes the mean over all counted labels
of the global batch. That number is one all-reduce of one value per optimizer step. The all-reduce
starts one step early, so that no rank waits for it: the loader reads one step ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from ...compat.torch import without_profiler_range
from .rows import NOT_COUNTED, PAIRS

COUNTED = "counted"  # key in the first batch of an optimizer step: its Counted


class Counted(NamedTuple):
    """How many labels count on this rank.

    Args:
        step: In the optimizer step.
        following: In the step after it. None: this is the last step.
        is_first: Whether an iteration over the data starts with this step.
    """

    step: int
    following: int | None
    is_first: bool


class StepLoader(DataLoader):
    """Starts reading when the first batch is requested: Lightning makes the iterator before it
    loads the checkpoint.

    Args:
        dataset: Returns batches by `__getitems__`.
        accumulation: Micro-batches per optimizer step. They are read together, one step ahead, and
            the first of them gets the key `COUNTED`. 0: an evaluation, which has no steps.
        transform: Applied to each batch in this process, also where workers read.
        options: Of DataLoader; a batch of the data set is not collated.
    """

    def __init__(
        self,
        dataset: Any,
        accumulation: int,
        transform: Callable[[Any], Any] = lambda batch: batch,
        **options: Any,
    ) -> None:
        super().__init__(dataset, collate_fn=dict, **options)
        self.accumulation = accumulation
        self.transform = transform

    def __iter__(self) -> Iterator[Any]:  # ty: ignore[incompatible-method-override]
        batches: Any = super().__iter__()
        if not self.num_workers:
            batches = without_profiler_range(batches)
        batches = map(self.transform, batches)
        if not self.accumulation:
            yield from batches
            return
        step, is_first = list(islice(batches, self.accumulation)), True
        counted = _counted(step)
        while step:
            following = list(islice(batches, self.accumulation))
            coming = _counted(following)
            yield step[0] | {COUNTED: Counted(counted, coming if following else None, is_first)}
            yield from step[1:]
            step, counted, is_first = following, coming, False


def _counted(step: list[Any]) -> int:
    """Returns the number of labels that count; of pairs, where the batches have these."""
    if step and PAIRS in step[0]:
        return sum(len(batch[PAIRS]) for batch in step)
    return sum(int(np.count_nonzero(batch["labels"].numpy() != NOT_COUNTED)) for batch in step)


class TokensPerMicroBatch:
    """Counted labels per micro-batch, averaged over the global batch and all ranks."""

    def __init__(self) -> None:
        self._coming: tuple[Tensor, Any] | None = None  # the next step's sum, perhaps unfinished

    def of(self, counted: Counted, accumulation: int, device: torch.device) -> Tensor:
        """Returns () float32, at least 1, and starts the sum of the next step.

        Collective over all ranks. On a GPU the stream waits for the sum and the host does not.
        """
        start = partial(_sum_over_ranks, accumulation, device)
        if counted.is_first or self._coming is None:
            self._coming = start(counted.step)
        total, work = self._coming
        if work is not None:
            work.wait()
            total /= dist.get_world_size()
        self._coming = None if counted.following is None else start(counted.following)
        mean = total / accumulation if accumulation > 1 else total
        return mean if work is None else mean.clamp(min=1)

    def close(self) -> None:
        """Waits for a started sum: a process that exits during a collective may be aborted."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[1] is not None:
            coming[1].wait()


def _sum_over_ranks(least: int, device: torch.device, counted: int) -> tuple[Tensor, Any]:
    """Starts the sum, alone at least `least`; Lightning's `reduce` waits at a barrier (2.6.6)."""
    several = dist.is_initialized()
    total = torch.full((), float(counted if several else max(counted, least)), device=device)
    return total, dist.all_reduce(total, async_op=True) if several else None
