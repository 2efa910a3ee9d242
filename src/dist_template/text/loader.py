"""The training loader: reads the micro-batches of an optimizer step together, and counts their labels.

Every strategy averages gradients over ranks and micro-batches. A sum of losses divided by the mean
number of counted labels per rank and micro-batch therefore becomes the mean over all counted labels
of the global batch. That number is one all-reduce of one value per optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from ..compat.torch import without_profiler_range
from .rows import NOT_COUNTED

COUNTED = "counted"  # key in the first batch of an optimizer step: how many of the step's labels count on this rank


class StepLoader(DataLoader):
    """Starts reading when the first batch is requested: Lightning makes the iterator before it loads the checkpoint.

    Args:
        dataset: Returns batches by `__getitems__`.
        accumulation: Micro-batches per optimizer step. They are read together, and the first of
            them gets the key `COUNTED`. 0: an evaluation, which has no steps.
        transform: Applied to each batch in this process, also where workers read.
        options: Of DataLoader.
    """

    def __init__(
        self, dataset: Any, accumulation: int, transform: Callable[[Any], Any] = lambda batch: batch, **options: Any
    ) -> None:
        super().__init__(dataset, **options)
        self.accumulation = accumulation
        self.transform = transform

    def __iter__(self) -> Iterator[Any]:  # ty: ignore[incompatible-method-override]
        batches: Any = super().__iter__()
        if not self.num_workers:
            batches = without_profiler_range(batches)
        batches = map(self.transform, batches)
        if not self.accumulation:
            yield from batches
        while step := list(islice(batches, self.accumulation)):
            counted = sum(int((batch["labels"] != NOT_COUNTED).sum()) for batch in step)
            yield step[0] | {COUNTED: counted}
            yield from step[1:]


def tokens_per_micro_batch(counted: int, accumulation: int, device: torch.device) -> Tensor:
    """Returns () float32, at least 1: counted labels per micro-batch, averaged over the global batch and all ranks.

    Collective over all ranks. On a GPU the stream waits for it and the host does not; Lightning's
    `strategy.reduce` would wait at a barrier first (2.6.6).
    """
    total = torch.full((), float(counted), device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return (total / accumulation if accumulation > 1 else total).clamp(min=1)
