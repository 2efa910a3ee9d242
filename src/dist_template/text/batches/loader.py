"""The training loader: reads the micro-batches of an optimizer step together, and counts their labels.

Every strategy averages gradients over ranks and micro-batches. A sum of losses divided by the mean
number of counted labels per rank and micro-batch therefore becomes the mean over all counted labels
of the global batch. That number is one all-reduce of one value per optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from ...compat.torch import without_profiler_range
from .rows import NOT_COUNTED, PAIRS

Batch = dict[str, Any]
Transform = Callable[[Batch], Batch]
COUNTED = "counted"  # key in the first batch of an optimizer step: labels on this rank that contribute to the loss


class StepLoader(DataLoader):
    """Starts reading when the first batch is requested: Lightning makes the iterator before it loads the checkpoint.

    Args:
        dataset: Returns batches by `__getitems__`.
        accumulation: Micro-batches per optimizer step. They are read together, and the first of them gets the key
            `COUNTED`. 0: an evaluation, which has no steps.
        transform: Applied to each batch in this process, also where workers read.
        options: Of DataLoader; a batch of the data set is not collated.
    """

    def __init__(self, dataset: Any, accumulation: int, transform: Transform = dict, **options: Any) -> None:
        super().__init__(dataset, collate_fn=dict, **options)
        self.accumulation = accumulation
        self.transform = transform

    def __iter__(self) -> Iterator[Batch]:  # ty: ignore[incompatible-method-override]
        batches: Any = super().__iter__()
        if not self.num_workers:
            batches = without_profiler_range(batches)
        batches = map(self.transform, batches)
        if not self.accumulation:
            yield from batches
        while step := list(islice(batches, self.accumulation)):
            yield step[0] | {COUNTED: sum(map(_counted, step))}
            yield from step[1:]


def _counted(batch: Batch) -> int:
    """Returns the number of labels that count, or of pairs."""
    if PAIRS in batch:
        return len(batch[PAIRS])
    return int(np.count_nonzero(batch["labels"].numpy() != NOT_COUNTED))


def tokens_per_micro_batch(counted: int, accumulation: int, device: torch.device) -> Tensor:
    """Returns (), at least 1: counted labels per micro-batch, averaged over the global batch and all ranks."""
    return (_sum_over_ranks(counted, device) / accumulation).clamp(min=1)


def _sum_over_ranks(counted: int, device: torch.device) -> Tensor:
    """Returns the sum, divided by the number of ranks. On a GPU the stream waits for it, and the host does not;
    Lightning's `reduce` waits at a barrier (2.6.6)."""
    total = torch.full((), float(counted), device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total
