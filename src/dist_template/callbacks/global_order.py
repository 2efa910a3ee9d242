"""The order of samples: a function of the seed and of the number of samples consumed so far, and of
nothing else.

The rows of the train split, shuffled anew for each epoch, make one endless stream. A global batch
is its next `global_batch_size` entries, however they are distributed over ranks and micro-batches:

    stream   | 17 3 88 4 | 25 61 9 0 | 71 ...           all rows, then all rows in another order
    step     |---- 0 ----|---- 1 ----|---- 2 ...        global_batch_size = 4
    rank     | 0  0  1 1 | 0  0  1 1 |                  2 ranks, micro_batch_size = 2
    rank     | 0  0  0 0 | 0  0  0 0 |                  1 rank, micro_batch_size = 2, accumulating 2

So a run resumes on another number of ranks with exactly the next samples. With `costs` or `speeds`,
equal_work.py assigns each global batch in another way: the same samples form a step, and ranks
finish it at the same time. A global batch that grows
(by_tokens.py) is a function of the consumed samples too. Its stream has no epochs: it ends with
`trainer.max_steps`."""

from __future__ import annotations

import sys
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Sampler

from ..by_tokens import Phase, batch_at
from ..compat.epochs import begin_step
from ..compat.lightning import batch_progress
from ..model.any_module import callbacks_of, metrics_of
from ..run_callback import RunCallback
from .equal_work import assign, counts_of

PADDING = -1  # a number that stands for no row: its labels are ignored
MANY = 1 << 27  # rows: a shuffled array of more takes each rank half a GB and several seconds


@dataclass(eq=False)
class GlobalOrder(Sampler[list[int]]):
    """Yields one rank's batches of row indices for training, from the consumed samples on.

    Its length is one epoch's batches; the rows that fill no global batch at its end come first in
    the next epoch. `consumed` is called when iteration starts, because the checkpoint is loaded
    after the loader is made. Without a `seed` rows are not shuffled.

    With `rows_per_epoch`, an epoch is so many rows, and the next one begins again with the first.

    `stream` returns the row at a position of the stream. It replaces the order by epochs. Where the
    global batch has phases by consumed tokens, `seq_len` a sample, there is no end.

    `costs` returns the work of given rows: then ranks get equal work. `speeds` returns the ranks'
    relative speeds in the step at a position of the stream, None: all are equally fast. A fast rank
    gets more rows, and more of the work. `drawn` is the position behind the newest step of which a
    batch was read."""

    num_rows: int
    global_batch_size: int | list[Phase]
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int | None = 0
    consumed: Callable[[], int] = lambda: 0
    repeat_first_batch: bool = False
    stream: Callable[[int], int] | None = None
    seq_len: int = 1
    rows_per_epoch: int = 0  # where an epoch is limited; 0: all rows
    costs: Callable[[list[int]], np.ndarray] | None = None
    speeds: Callable[[int], Sequence[float] | None] | None = None

    def __post_init__(self) -> None:
        self.samples_per_batch = self.micro_batch_size * self.world_size
        self.drawn = 0

    def __len__(self) -> int:
        if isinstance(self.global_batch_size, list):
            # without a length, Lightning reads a batch before it loads a checkpoint
            return sys.maxsize
        return self.num_rows // self.global_batch_size * next(self.accumulations())

    def accumulations(self) -> Iterator[int]:
        """Yields the micro-batches of each optimizer step, from the consumed samples on."""
        position = self.consumed()
        while True:
            size = batch_at(self.global_batch_size, position * self.seq_len)
            yield size // self.samples_per_batch
            position += size

    def __iter__(self) -> Iterator[list[int]]:
        if self.world_size > 1 and (self.costs or self.speeds):
            yield from self._balanced()
            return
        start = self.consumed()
        for batch in range(len(self)):
            position = start + batch * self.samples_per_batch
            if self.repeat_first_batch:
                position %= batch_at(self.global_batch_size, 0)
            yield self._entries(position + self.rank * self.micro_batch_size, self.micro_batch_size)

    def _balanced(self) -> Iterator[list[int]]:
        """Yields this rank's batches where `costs` or `speeds` decide which samples it gets."""
        position, batches_left = self.consumed(), len(self)
        for accumulation in self.accumulations():
            if batches_left < accumulation:
                return
            batches_left -= accumulation
            rows = self._rows_of_step(position, accumulation)
            speeds = self.speeds(position) if self.speeds else None
            position += len(rows)
            self.drawn = position
            costs = self.costs(rows) if self.costs else np.ones(len(rows))
            counts = counts_of(len(rows), accumulation, speeds, self.world_size)
            assigned = assign(costs, counts, speeds or [1.0] * self.world_size)
            for batch in assigned[self.rank]:
                yield [rows[sample] for sample in batch]

    def _rows_of_step(self, position: int, accumulation: int) -> list[int]:
        """Returns the rows of the global batch that starts at `position`, of all ranks."""
        size = self.samples_per_batch
        if not self.repeat_first_batch:
            return self._entries(position, accumulation * size)
        first, rows = batch_at(self.global_batch_size, 0), list[int]()
        for at in range(position, position + accumulation * size, size):
            rows += self._entries(at % first, size)
        return rows

    def _entries(self, position: int, count: int) -> list[int]:
        """Returns `count` entries of the stream from `position` on."""
        if self.stream:
            return [self.stream(number) for number in range(position, position + count)]
        rows: list[int] = []
        while len(rows) < count:
            per_epoch = self.rows_per_epoch or self.num_rows
            epoch, offset = divmod(position + len(rows), per_epoch)
            places = np.arange(offset, min(per_epoch, offset + count - len(rows)))
            if self.seed is not None and self.num_rows > MANY:
                rows += scattered(places, self.num_rows, self.seed, epoch).tolist()
            else:
                rows += permutation(self.num_rows, self.seed, epoch)[places].tolist()
        return rows


def scattered(places: np.ndarray, num_rows: int, *seeds: int) -> np.ndarray:
    """Returns the rows at `places` (n,) of an order like `shuffled`'s, without the other rows. It
    is a Feistel network on the smallest square of a power of two that holds all rows; a number that
    is no row is put through it again."""
    last, half = np.uint64(num_rows - 1), np.uint64(((num_rows - 2).bit_length() + 1) // 2)
    keys = np.random.default_rng(seeds).integers(2**64, size=8, dtype=np.uint64)
    rows = places.astype(np.uint64)
    moved = rows < last
    while moved.any():
        left, right = rows[moved] >> half, rows[moved] & ((np.uint64(1) << half) - np.uint64(1))
        for key in keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)  # odd: 2^64 over the golden ratio
            mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ mixed >> np.uint64(64) - half
        rows[moved] = left << half | right
        moved &= rows >= last
    return rows


@lru_cache(maxsize=2)
def permutation(num_rows: int, seed: int | None, epoch: int) -> np.ndarray:
    """Returns the rows (num_rows,) in the order of that epoch."""
    return np.arange(num_rows) if seed is None else shuffled(num_rows, seed, epoch)


def shuffled(num_rows: int, *seeds: int) -> np.ndarray:
    """Returns the rows in random order. The last row, which may overlap another, stays last."""
    rows = np.arange(num_rows, dtype=np.uint32 if num_rows < 2**32 else np.uint64)
    np.random.default_rng(seeds).shuffle(rows[:-1])
    return rows


def eval_batches(
    sizes: dict[str, int], micro_batch_size: int, rank: int = 0, world_size: int = 1
) -> list[list[int]]:
    """Returns a rank's batches for evaluation, of one source each, the sources interleaved.
    Together the ranks read every row exactly once. Padding gives all ranks the same number of full
    batches. `sizes` are the numbers of rows of each source; row -1 - n is padding of source n."""
    timed, first = [], 0
    for number, size in enumerate(sizes.values()):
        num_batches = -(-size // (micro_batch_size * world_size))
        for batch in range(num_batches):
            start = (batch * world_size + rank) * micro_batch_size
            rows = range(start, start + micro_batch_size)
            found = [first + row if row < size else PADDING - number for row in rows]
            timed.append((batch / num_batches, number, found))
        first += size
    return [rows for _, _, rows in sorted(timed)]


def source_of(sizes: dict[str, int], row: int) -> str:
    """Returns the source of a row."""
    number = PADDING - row if row < 0 else bisect(list(accumulate(sizes.values())), row)
    return [*sizes][number]


class ConsumedSamples(RunCallback):
    """Counts the samples that were trained on, so that a run resumes with another micro-batch or
    number of ranks.

    The count follows the trainer's processed batches, because the loader's workers read ahead."""

    def __init__(
        self, global_batch_size: int, samples_per_batch: int, processed_batches: int
    ) -> None:
        self._global_batch_size = global_batch_size
        self._samples_per_batch = samples_per_batch  # over all ranks
        self._base = processed_batches * samples_per_batch
        self._base_batches = processed_batches
        self._loaded: dict[str, Any] = {}
        self.grows = False  # whether steps differ in their batches
        self.figures: Callable[[int], dict[str, float]] = lambda position: {}  # further metrics

    @classmethod
    def attach(
        cls, trainer: Any, global_batch_size: int, samples_per_batch: int
    ) -> ConsumedSamples:
        """Returns a new counter for this `fit`, inserted as the trainer's first callback."""
        counter = cls(global_batch_size, samples_per_batch, batch_progress(trainer).total.processed)
        others = [each for each in callbacks_of(trainer) if not isinstance(each, cls)]
        trainer.callbacks = [counter, *others]
        return counter

    def value(self, trainer: Trainer) -> int:
        """Returns the samples of all processed batches."""
        batches = batch_progress(trainer).total.processed - self._base_batches
        return self._base + batches * self._samples_per_batch

    def before_log_step(self, trainer: Trainer, module: Any) -> None:
        for name, value in self.figures(self.value(trainer)).items():
            metrics_of(module).put(name, value)
        if self.grows:
            metrics_of(module).put(
                "train/global_batch_size", trainer.accumulate_grad_batches * self._samples_per_batch
            )

    def as_state(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "consumed_samples": self.value(trainer),
            "global_batch_size": self._global_batch_size,
            "samples_per_batch": self._samples_per_batch,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the count, after the trainer's counters and before the first batch is read."""
        if not self._loaded:
            return
        before = (self._loaded["global_batch_size"], self._loaded["samples_per_batch"])
        if before != (self._global_batch_size, self._samples_per_batch):
            _rescale(
                batch_progress(trainer), before[1], self._global_batch_size, self._samples_per_batch
            )
        # of earlier versions
        skipped = sum(end - start for start, end in self._loaded.get("jumps", ()))
        self._base = self._loaded["consumed_samples"] + skipped
        self._base_batches = batch_progress(trainer).total.processed
        self._loaded = {}
        if self.grows:  # a checkpoint is written after a full step
            begin_step(trainer, 0)


def _rescale(progress: Any, old: int, global_batch_size: int, new: int) -> None:
    """Converts Lightning's batch counts, for accumulation, from `old` to `new` samples a batch."""
    for counter in (progress.total, progress.current):
        # the boundary of a step
        ready = counter.ready * old // global_batch_size * (global_batch_size // new)
        shift = ready - counter.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(counter, name, getattr(counter, name) + shift)
