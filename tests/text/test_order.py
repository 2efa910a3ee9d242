"""The order of samples does not depend on who reads them, and a run resumes exactly."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.library import global_order

COUNTERS = ("ready", "started", "processed", "completed")
PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)


class Attempt(NamedTuple):
    """A job between two checkpoints: batch sizes, data-parallel ranks, and its number of steps."""

    micro: int
    ranks: int
    accumulation: int
    steps: int

    @property
    def global_batch(self) -> int:
        return self.micro * self.ranks * self.accumulation


FEW = st.integers(1, 4)
ATTEMPTS = st.lists(st.builds(Attempt, FEW, FEW, FEW, st.integers(1, 6)), min_size=1, max_size=4)


class Run:
    """A run over several attempts: counts batches as Lightning's loops, keeps a checkpoint."""

    def __init__(self, num_rows: int, seed: int | None) -> None:
        self.num_rows, self.seed = num_rows, seed
        self.rows: list[int] = []  # in the order in which they were read
        total, current = (SimpleNamespace(**dict.fromkeys(COUNTERS, 0)) for _ in range(2))
        self.saved: Any = (SimpleNamespace(total=total, current=current), {})

    def train(self, attempt: Attempt) -> None:
        progress, state = copy.deepcopy(self.saved)
        loop = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(processed=0)))
        trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), callbacks=[])
        sizes = (attempt.global_batch, attempt.micro * attempt.ranks)
        counter = global_order.ConsumedSamples.attach(trainer, *sizes)
        loop.batch_progress = progress  # Lightning restores its counters after `setup`
        counter.load(state)
        counter.on_train_start(trainer, SimpleNamespace())  # ty: ignore[invalid-argument-type]
        wanted = counter.value(trainer) + attempt.steps * attempt.global_batch
        while counter.value(trainer) < wanted:
            self._epoch(attempt, progress, lambda: counter.value(trainer), wanted)
        self.saved = (progress, counter.as_state(trainer))

    def _epoch(self, attempt: Attempt, progress: Any, consumed: Any, wanted: int) -> None:
        sizes, ranks = (self.num_rows, attempt.global_batch, attempt.micro), attempt.ranks
        orders = [
            global_order.GlobalOrder(*sizes, rank, ranks, self.seed, consumed=consumed)
            for rank in range(ranks)
        ]
        if progress.current.ready >= len(orders[0]):
            vars(progress.current).update(dict.fromkeys(COUNTERS, 0))
        for batches in zip(*orders, strict=True):
            if progress.current.ready >= len(orders[0]) or consumed() >= wanted:
                return
            for batch in batches:
                assert len(batch) == attempt.micro
                self.rows += batch
            for each in (progress.total, progress.current):
                for name in COUNTERS:
                    setattr(each, name, getattr(each, name) + 1)


def stream(num_rows: int, seed: int | None) -> Iterator[int]:
    """All rows, then all rows in another order, and so on."""
    for epoch in count():
        yield from global_order.permutation(num_rows, seed, epoch).tolist()


@PROPERTY
@given(st.integers(0, 40), st.none() | st.integers(0, 3), ATTEMPTS)
def test_a_run_of_any_attempts_reads_the_stream_without_a_gap(
    spare_rows: int, seed: int | None, jobs: list[Attempt]
) -> None:
    """Each attempt may have other numbers of ranks, micro-batch and global batch; over epochs."""
    run = Run(max(job.global_batch for job in jobs) + spare_rows, seed)
    for job in jobs:
        run.train(job)
    uninterrupted = stream(run.num_rows, seed)
    assert run.rows == [next(uninterrupted) for _ in run.rows]
    assert len(run.rows) == sum(job.steps * job.global_batch for job in jobs)


@PROPERTY
@given(st.integers(2, 60), st.integers(0, 5), st.integers(0, 5))
def test_each_pass_has_every_row_in_another_order(num_rows: int, seed: int, epoch: int) -> None:
    rows = global_order.permutation(num_rows, seed, epoch).tolist()
    assert sorted(rows) == [*range(num_rows)]
    assert rows[-1] == num_rows - 1, "the last row, in which only a part may count, stays the last"
    if num_rows > 20:  # two of 19! orders
        assert rows != global_order.permutation(num_rows, seed, epoch + 1).tolist()
        assert rows != global_order.permutation(num_rows, seed + 1, epoch).tolist()


@PROPERTY
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 6))
def test_evaluation_reads_every_row_once_in_equally_many_full_batches(
    rows: int, micro: int, ranks: int
) -> None:
    read = []
    for rank in range(ranks):
        batches = global_order.eval_batches({"": rows}, micro, rank, ranks)
        assert len(batches) == -(-rows // (micro * ranks))
        assert {len(batch) for batch in batches} == {micro}
        read += [row for batch in batches for row in batch]
    assert sorted(row for row in read if row != global_order.PADDING) == [*range(rows)]
    assert len(read) - rows < ranks * micro, "no more padding than it takes"
