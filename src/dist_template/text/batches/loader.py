"""The training loader: reads the micro-batches of an optimizer step together, and counts their
labels.

    StepLoader            rows of the data set, then `transform`, then pinned memory; the first
                          batch of a step has the numbers of labels of this rank (Counted)
    TokensPerMicroBatch   the sum over ranks, which is started one step before it is read

Every strategy averages gradients over ranks and micro-batches. A sum of losses divided by the mean
number of counted labels per rank and micro-batch therefore becomes the mean over all counted labels
of the global batch. That number is one all-reduce of one value per optimizer step. The all-reduce
starts one step early, so that no rank waits for it: the loader reads one step ahead."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from ...compat.torch import without_profiler_range
from .rows import NOT_COUNTED, PAIRS

Batch = dict[str, Any]
Transform = Callable[[Batch], Batch]
Accumulations = Callable[[], Iterator[int]]
COUNTED = "counted"  # key in the first batch of an optimizer step: its Counted


class Counted(NamedTuple):
    """Numbers of labels on this rank that contribute to the loss."""

    step: tuple[int, int]  # in the optimizer step, and its micro-batches
    following: tuple[int, int] | None  # in the step after it; None: this is the last step
    is_first: bool  # whether an iteration over the data starts with this step


class StepLoader(DataLoader):
    """Starts reading when the first batch is requested: Lightning makes the iterator before it
    loads the checkpoint.

    Args:
        dataset: Returns batches by `__getitems__`.
        accumulations: Yields the micro-batches of each optimizer step. They are read together, one
            step ahead, and the first of them gets the key `COUNTED`. None: an evaluation, which has
            no steps.
        transform: Applied to each batch in this process, also where workers read.
        options: Of DataLoader; a batch of the data set is not collated."""

    def __init__(
        self,
        dataset: Any,
        accumulations: Accumulations | None,
        transform: Transform = dict,
        **options: Any,
    ) -> None:
        super().__init__(dataset, collate_fn=dict, **options)
        self.accumulations = accumulations
        self.transform = transform

    def __iter__(self) -> Iterator[Batch]:  # ty: ignore[incompatible-method-override]
        batches: Any = super().__iter__()
        if not self.num_workers:
            batches = without_profiler_range(batches)
        batches = map(self.transform, batches)
        if self.pin_memory:
            batches = map(_pinned, batches)
        if not self.accumulations:
            yield from batches
            return
        step: list[Batch] = []
        counted, is_first = None, True
        for num_batches in self.accumulations():
            following = list(islice(batches, num_batches))
            coming = None
            if following:
                coming = _labels_of(following), num_batches
            if counted:
                yield step[0] | {COUNTED: Counted(counted, coming, is_first)}
                yield from step[1:]
                is_first = False
            if not coming:
                return
            step, counted = following, coming


def _pinned(batch: Batch) -> Batch:
    """Pins what `transform` has made: a copy from other memory waits for the device."""
    pinned = {}
    for name, value in batch.items():
        if isinstance(value, Tensor):
            value = value.pin_memory()
        pinned[name] = value
    return pinned


def _labels_of(step: list[Batch]) -> int:
    """Returns the number of labels that count, or of pairs."""
    total = 0
    for batch in step:
        if PAIRS in batch:
            total += len(batch[PAIRS])
        else:
            total += int(np.count_nonzero(batch["labels"].numpy() != NOT_COUNTED))
    return total


class TokensPerMicroBatch:
    """Counted labels per micro-batch, averaged over the global batch and all ranks."""

    def __init__(self) -> None:
        self._coming: tuple[Tensor, dist.Work | None] | None = None  # the next step's sum

    def of(self, counted: Counted, device: torch.device) -> Tensor:
        """Returns () float32, at least 1, and starts the sum of the next step. Collective over all
        ranks. On a GPU the stream waits for the sum and the host does not."""
        if counted.is_first or self._coming is None:
            self._coming = _sum_over_ranks(device, *counted.step)
        total, work = self._coming
        if work is not None:
            work.wait()
            total /= dist.get_world_size()
        self._coming = None
        if counted.following is not None:
            self._coming = _sum_over_ranks(device, *counted.following)
        _, num_batches = counted.step
        if num_batches > 1:
            total = total / num_batches
        if work is None:  # `_sum_over_ranks` has bounded it
            return total
        return total.clamp(min=1)

    def close(self) -> None:
        """Waits for a started sum: a process that exits during a collective may be aborted."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[1] is not None:
            coming[1].wait()


def _sum_over_ranks(
    device: torch.device, counted: int, least: int
) -> tuple[Tensor, dist.Work | None]:
    """Starts the sum, alone at least `least`; Lightning's `reduce` waits at a barrier (2.6.6)."""
    if not dist.is_initialized():
        return torch.full((), float(max(counted, least)), device=device), None
    total = torch.full((), float(counted), device=device)
    return total, dist.all_reduce(total, async_op=True)
