"""The order of samples does not depend on who reads them, and a run resumes exactly at its position in the stream."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.library import global_order

COUNTERS = ("ready", "started", "processed", "completed")
PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Attempt:
    """A job between two checkpoints: its batch sizes, its data-parallel ranks, and after how many steps it stops."""

    micro: int
    ranks: int
    accumulation: int
    steps: int
    jumps: tuple[global_order.Jump, ...] = ()  # that the run is asked to skip when it starts

    @property
    def global_batch(self) -> int:
        return self.micro * self.ranks * self.accumulation


def attempts(jumps: bool = False) -> st.SearchStrategy[list[Attempt]]:
    sizes = st.integers(1, 4)
    interval = st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda each: (each[0], each[0] + each[1]))
    intervals = st.lists(interval, max_size=3).map(tuple) if jumps else st.just(())
    return st.lists(st.builds(Attempt, sizes, sizes, sizes, st.integers(1, 6), intervals), min_size=1, max_size=4)


class Run:
    """A run over several attempts. Counts batches as Lightning's loops do, and keeps what a checkpoint would hold."""

    def __init__(self, num_rows: int, seed: int | None, **balance: Any) -> None:
        self.num_rows = num_rows
        self.balance = balance  # options of GlobalOrder
        self.seed = seed
        self.rows: list[int] = []  # in the order in which they were read
        self.start = 0  # consumed samples when the newest attempt started
        counters = {name: SimpleNamespace(**dict.fromkeys(COUNTERS, 0)) for name in ("total", "current")}
        self.saved: tuple[Any, dict[str, Any]] = (SimpleNamespace(**counters), {})

    def train(self, attempt: Attempt) -> None:
        progress, state = copy.deepcopy(self.saved)
        loop = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(processed=0)))
        trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), callbacks=[])
        counter = global_order.ConsumedSamples.attach(trainer, attempt.global_batch, attempt.micro * attempt.ranks)
        loop.batch_progress = progress  # Lightning restores its counters after `setup`
        counter.load(state)
        module: Any = None
        counter.on_train_start(trainer, module)
        self.start = counter.value(trainer)
        counter.jump(attempt.jumps, trainer)
        wanted = self.start + attempt.steps * attempt.global_batch
        while counter.value(trainer) < wanted:
            self._epoch(attempt, trainer, counter, wanted)
        self.saved = (progress, counter.as_state(trainer))

    def _epoch(self, attempt: Attempt, trainer: Any, counter: global_order.ConsumedSamples, wanted: int) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        orders = [
            global_order.GlobalOrder(
                self.num_rows, attempt.global_batch, attempt.micro, rank, attempt.ranks, self.seed,
                consumed=lambda: counter.value(trainer), jumps=lambda: counter.jumps,
                **self.balance,
            )
            for rank in range(attempt.ranks)
        ]  # fmt: skip
        if progress.current.ready >= len(orders[0]):
            vars(progress.current).update(dict.fromkeys(COUNTERS, 0))
        for batches in zip(*orders, strict=True):
            if progress.current.ready >= len(orders[0]) or counter.value(trainer) >= wanted:
                return
            for batch in batches:
                assert len(batch) == attempt.micro
                self.rows += batch
            for each in (progress.total, progress.current):
                for name in COUNTERS:
                    setattr(each, name, getattr(each, name) + 1)


def stream(num_rows: int, seed: int | None) -> Iterator[int]:
    """All rows, then all rows in another order, and so on."""
    epoch = 0
    while True:
        yield from global_order.permutation(num_rows, seed, epoch).tolist()
        epoch += 1


@PROPERTY
@given(st.integers(0, 40), st.none() | st.integers(0, 3), attempts())
def test_a_run_of_any_attempts_reads_the_stream_without_a_gap(
    spare_rows: int, seed: int | None, jobs: list[Attempt]
) -> None:
    """Each attempt may have another number of ranks, micro-batch and global batch, over any number of epochs."""
    run = Run(max(job.global_batch for job in jobs) + spare_rows, seed)
    for job in jobs:
        run.train(job)
    uninterrupted = stream(run.num_rows, seed)
    assert run.rows == [next(uninterrupted) for _ in run.rows]
    assert len(run.rows) == sum(job.steps * job.global_batch for job in jobs)


@PROPERTY
@given(st.integers(0, 40), attempts(jumps=True))
def test_balancing_changes_no_step(spare_rows: int, jobs: list[Attempt]) -> None:
    """Costs decide who computes a sample; each step of each attempt has the samples that it has without them."""
    num_rows = max(job.global_batch for job in jobs) + spare_rows
    plain, even = Run(num_rows, 0), Run(num_rows, 0, costs=lambda rows: np.square(rows))
    for job in jobs:
        plain.train(job)
        even.train(job)
        size = job.global_batch
        for start in range(0, job.steps * size, size):
            assert sorted(even.rows[start:][:size]) == sorted(plain.rows[start:][:size])
        plain.rows, even.rows = [], []


@PROPERTY
@given(st.integers(0, 40), attempts(jumps=True))
def test_jumped_intervals_are_read_by_no_rank_and_all_other_rows_once(spare_rows: int, jobs: list[Attempt]) -> None:
    run = Run(max(job.global_batch for job in jobs) + spare_rows, 0)
    jumped: set[int] = set()  # positions of the stream
    read: list[int] = []
    for job in jobs:
        run.train(job)
        now = read[-1] + 1 if read else 0
        while now in jumped:
            now += 1
        for start, end in job.jumps:
            if start >= now:  # what was read before stays read
                jumped |= {*range(start, end)}
        while len(read) < len(run.rows):
            while now in jumped:
                now += 1
            read.append(now)
            now += 1
    expected = [int(global_order.permutation(run.num_rows, 0, at // run.num_rows)[at % run.num_rows]) for at in read]
    assert run.rows == expected


@PROPERTY
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple)), st.integers(0, 80))
def test_the_position_in_the_stream_is_the_next_one_outside_of_all_jumps(
    intervals: list[global_order.Jump], consumed: int
) -> None:
    jumps = global_order.with_jumps(intervals[::2], intervals[1::2])
    assert all(end < start for (_, end), (start, _) in zip(jumps, jumps[1:], strict=False)), "sorted and disjoint"
    jumped = {at for start, end in intervals for at in range(start, end)}
    assert global_order.stream_position(consumed, jumps) == [at for at in range(200) if at not in jumped][consumed]


@PROPERTY
@given(st.integers(2, 60), st.integers(0, 5), st.integers(0, 5))
def test_each_pass_has_every_row_once_in_an_order_of_its_own(num_rows: int, seed: int, epoch: int) -> None:
    rows = global_order.permutation(num_rows, seed, epoch).tolist()
    assert sorted(rows) == [*range(num_rows)]
    assert rows[-1] == num_rows - 1, "the last row, in which only a part may count, stays the last"
    if num_rows > 20:  # two of 19! orders
        assert rows != global_order.permutation(num_rows, seed, epoch + 1).tolist()
        assert rows != global_order.permutation(num_rows, seed + 1, epoch).tolist()


@PROPERTY
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 6))
def test_evaluation_reads_every_row_once_in_equally_many_full_batches(rows: int, micro: int, ranks: int) -> None:
    read = []
    for rank in range(ranks):
        batches = global_order.eval_batches({"": rows}, micro, rank, ranks)
        assert len(batches) == -(-rows // (micro * ranks)) and all(len(batch) == micro for batch in batches)
        read += [row for batch in batches for row in batch]
    assert sorted(row for row in read if row != global_order.PADDING) == [*range(rows)]
    assert len(read) - rows < ranks * micro, "no more padding than it takes"


def test_an_epoch_has_one_length_wherever_it_starts() -> None:
    order = global_order.GlobalOrder(53, 12, 3, 1, 2, consumed=lambda: 30)
    assert len(order) == len(list(order)) == 53 // 12 * 2


def test_the_first_batch_can_be_repeated() -> None:
    batches = list(global_order.GlobalOrder(53, 12, 6, repeat_first_batch=True))
    assert batches[0] != batches[1]
    assert batches == batches[:2] * 4
