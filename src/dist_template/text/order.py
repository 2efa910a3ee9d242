"""Which rows a rank reads next: a function of the seed and of the samples consumed so far, of nothing else.

The rows of the train split, shuffled anew for each pass, make one endless stream. A global batch is its next
`global_batch_size` entries, whichever ranks share them and in however many micro-batches:

    stream   | 17 3 88 4 | 25 61 9 0 | 71 ...           all rows, then all rows in another order
    step     |---- 0 ----|---- 1 ----|---- 2 ...        global_batch_size = 4
    rank     | 0  0  1 1 | 0  0  1 1 |                  2 ranks, micro_batch_size = 2
    rank     | 0  0  0 0 | 0  0  0 0 |                  1 rank, micro_batch_size = 2, accumulating 2

So a run resumes on another number of ranks with exactly the samples that it has not seen.

A jump is an interval [start, end) of the stream that nobody reads: what follows moves up. It counts as not consumed, so
sample number `consumed` stands at `stream_position(consumed, jumps)`. callbacks/numerics.py jumps what broke training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, Sampler

from ..compat.torch import without_profiler_range
from .weight import Window

PADDING = -1  # an index that stands for no row: its labels are ignored
NOT_COUNTED = -100  # a label that cross_entropy ignores
WINDOW = "window"  # key of a window's first batch
ROWS = "rows"  # key of a batch: its rows' numbers, a list, which stays on the host

Jump = tuple[int, int]


class GlobalOrder(Sampler[list[int]]):
    """Batches of row indices for one rank's training, from the consumed samples on.

    Its length is one epoch's batches; the rows that fill no global batch at its end come first in the next.
    `consumed` is asked when iteration begins: the checkpoint is loaded after the loader is made. Without a `seed`
    rows come in their own order.
    """

    def __init__(
        self,
        num_rows: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = 0,
        consumed: Callable[[], int] = lambda: 0,
        repeat_first_batch: bool = False,
        jumps: Callable[[], list[Jump]] = list,
    ) -> None:
        self.num_rows = num_rows
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.consumed = consumed
        self.repeat_first_batch = repeat_first_batch
        self.jumps = jumps

    def __len__(self) -> int:
        accumulation = self.global_batch_size // (self.micro_batch_size * self.world_size)
        return self.num_rows // self.global_batch_size * accumulation

    def __iter__(self) -> Iterator[list[int]]:
        samples_per_batch = self.micro_batch_size * self.world_size
        start = self.consumed()
        for batch in range(len(self)):
            position = start + batch * samples_per_batch
            if self.repeat_first_batch:
                position %= self.global_batch_size
            yield self._entries(position + self.rank * self.micro_batch_size, self.micro_batch_size)

    def _entries(self, position: int, count: int) -> list[int]:
        """`count` entries of the stream, without what is jumped, from the `position`-th on."""
        jumps = self.jumps()
        epoch, offset = divmod(position, self.num_rows)
        if not jumps and offset + count <= self.num_rows:
            return permutation(self.num_rows, self.seed, epoch)[offset : offset + count].tolist()
        places = [divmod(stream_position(position + i, jumps), self.num_rows) for i in range(count)]
        return [int(permutation(self.num_rows, self.seed, epoch)[offset]) for epoch, offset in places]


def stream_position(consumed: int, jumps: Iterable[Jump]) -> int:
    """Where in the stream the sample stands that is read after `consumed` others; `jumps` are sorted and disjoint."""
    position = consumed
    for start, end in jumps:
        if position >= start:
            position += end - start
    return position


def with_jumps(jumps: Iterable[Jump], more: Iterable[Jump]) -> list[Jump]:
    """All of them, sorted, those that touch made one."""
    merged: list[Jump] = []
    for start, end in sorted((int(start), int(end)) for start, end in [*jumps, *more]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


@lru_cache(maxsize=2)
def permutation(num_rows: int, seed: int | None, epoch: int) -> np.ndarray:
    """(num_rows,) the rows in the order of that pass; the last one, of which only a part may count, stays the last."""
    rows = np.arange(num_rows, dtype=np.uint32 if num_rows < 2**32 else np.uint64)
    if seed is not None:
        np.random.default_rng((seed, epoch)).shuffle(rows[:-1])
    return rows


class EvalOrder(Sampler[list[int]]):
    """Every row once over all ranks, in order; padding gives all ranks equally many full batches."""

    def __init__(self, num_rows: int, micro_batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.num_rows = num_rows
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return -(-self.num_rows // (self.micro_batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(len(self)):
            start = (batch * self.world_size + self.rank) * self.micro_batch_size
            yield [i if i < self.num_rows else PADDING for i in range(start, start + self.micro_batch_size)]


class LazyLoader(DataLoader):
    """Asks its order where to begin when the first batch is wanted, and no earlier.

    Lightning makes the iterator before it has loaded the checkpoint, and workers would start at sample 0.

    `window` > 0 is the number of batches in an optimizer step: it reads them all, and the next step's, before it gives
    the first, which then says how many of this rank's labels count in both (weight.py).
    """

    def __init__(
        self, dataset: Any, window: int = 0, transform: Callable[[Any], Any] = lambda batch: batch, **options: Any
    ) -> None:
        super().__init__(dataset, **options)
        self.window = window
        self.transform = transform  # called in this process, also where workers read

    def __iter__(self) -> Iterator[Any]:  # ty: ignore[incompatible-method-override]
        batches: Any = super().__iter__()
        if not self.num_workers:  # what next() does beside this, a range for torch's profiler, is half of its time
            batches = without_profiler_range(batches)
        batches = map(self.transform, batches)
        if not self.window:
            yield from batches
            return
        window, is_first = list(islice(batches, self.window)), True
        tokens = _counted(window)
        while window:
            following = list(islice(batches, self.window))
            coming = _counted(following)
            yield window[0] | {WINDOW: Window(tokens, coming if following else None, is_first)}
            yield from window[1:]
            window, tokens, is_first = following, coming, False


def _counted(window: list[Any]) -> int:
    """Labels that count."""
    return sum(int(np.count_nonzero(batch["labels"].numpy() != NOT_COUNTED)) for batch in window)


class ConsumedSamples(Callback):
    """Counts the samples that were trained on; lets a run resume with another micro-batch or number of ranks.

    The count follows the trainer's processed batches, not the order, which workers run ahead of.
    """

    def __init__(self, global_batch_size: int, samples_per_batch: int, processed_batches: int) -> None:
        self._global_batch_size = global_batch_size
        self._samples_per_batch = samples_per_batch  # over all ranks
        self._base = processed_batches * samples_per_batch
        self._base_batches = processed_batches
        self._loaded: dict[str, Any] = {}
        self.jumps: list[Jump] = []

    @classmethod
    def attach(cls, trainer: Any, global_batch_size: int, samples_per_batch: int) -> ConsumedSamples:
        """A new count for this `fit`, as the first of the trainer's callbacks."""
        counter = cls(global_batch_size, samples_per_batch, _progress(trainer).total.processed)
        trainer.callbacks = [counter, *(c for c in trainer.callbacks if not isinstance(c, cls))]
        return counter

    def value(self, trainer: Trainer) -> int:
        return self._base + (_progress(trainer).total.processed - self._base_batches) * self._samples_per_batch

    def as_state(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "consumed_samples": self.value(trainer),
            "global_batch_size": self._global_batch_size,
            "samples_per_batch": self._samples_per_batch,
            "jumps": [list(jump) for jump in self.jumps],
        }

    def load(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def jump(self, jumps: Iterable[Jump], trainer: Trainer) -> None:
        """Leave these intervals out from now on; what was read before stays read. Before the first batch is wanted."""
        now = stream_position(self.value(trainer), self.jumps)
        self.jumps = with_jumps(self.jumps, (jump for jump in jumps if jump[0] >= now))

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Now the trainer's own counters are restored, and no batch has been asked for yet."""
        if not self._loaded:
            return
        before = (self._loaded["global_batch_size"], self._loaded["samples_per_batch"])
        if before != (self._global_batch_size, self._samples_per_batch):
            _rescale(_progress(trainer), before[1], self._global_batch_size, self._samples_per_batch)
        self._base, self._base_batches = self._loaded["consumed_samples"], _progress(trainer).total.processed
        self.jumps = with_jumps(self._loaded.get("jumps", ()), ())
        self._loaded = {}


def _progress(trainer: Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress


def _rescale(progress: Any, old: int, global_batch_size: int, new: int) -> None:
    """Lightning accumulates by its count of batches, which held `old` samples each and now hold `new`."""
    for counter in (progress.total, progress.current):
        ready = counter.ready * old // global_batch_size * (global_batch_size // new)  # at a step's boundary
        shift = ready - counter.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(counter, name, getattr(counter, name) + shift)
