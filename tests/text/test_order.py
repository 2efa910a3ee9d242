"""The order of rows: the same whatever shares the work, and resumable anywhere."""

from __future__ import annotations

import itertools

import pytest

from dist_template.text.order import PADDING, EvalOrder, GlobalOrder, permutation, stream_position, with_jumps

ROWS, GLOBAL = 53, 12


def stream(world_size: int, micro: int, steps: int, consumed: int = 0, seed: int = 0) -> list[list[int]]:
    """The rows of each global batch, in the order of ranks, over as many epochs as it takes."""
    seen: list[int] = []
    while len(seen) < steps * GLOBAL:
        begin = consumed + len(seen)
        ranks = [
            GlobalOrder(ROWS, GLOBAL, micro, rank, world_size, seed, lambda at=begin: at) for rank in range(world_size)
        ]
        for batches in zip(*ranks, strict=True):
            assert all(len(batch) == micro for batch in batches)
            seen += itertools.chain(*batches)
    return [seen[i : i + GLOBAL] for i in range(0, steps * GLOBAL, GLOBAL)]


@pytest.mark.parametrize(("world_size", "micro"), [(1, 1), (1, 4), (2, 2), (2, 6), (3, 4), (6, 2), (12, 1)])
def test_order_depends_neither_on_ranks_nor_on_micro_batch(world_size: int, micro: int) -> None:
    assert stream(world_size, micro, steps=20) == stream(1, GLOBAL, steps=20)


def test_each_pass_sees_every_row_once_and_in_a_new_order() -> None:
    flat = list(itertools.chain(*stream(2, 3, steps=ROWS)))  # ROWS * GLOBAL entries are GLOBAL passes
    passes = [flat[i : i + ROWS] for i in range(0, len(flat), ROWS)]
    assert len(passes) == GLOBAL
    assert all(sorted(one) == list(range(ROWS)) for one in passes)
    assert len({tuple(one) for one in passes}) == GLOBAL


def test_another_seed_gives_another_order() -> None:
    assert stream(1, 4, steps=4, seed=0) != stream(1, 4, steps=4, seed=1)


@pytest.mark.parametrize("step", range(10))
def test_resuming_at_any_step_on_other_ranks_gives_exactly_the_rest(step: int) -> None:
    whole = stream(1, 6, steps=12)
    assert stream(2, 3, steps=12 - step, consumed=step * GLOBAL) == whole[step:]


def test_resuming_with_another_global_batch_neither_repeats_nor_skips_a_row() -> None:
    first = list(itertools.chain(*stream(1, 4, steps=2)))
    rest = itertools.chain(*GlobalOrder(ROWS, 7, 7, consumed=lambda: 2 * GLOBAL))
    assert sorted(first + list(rest)[: ROWS - 2 * GLOBAL]) == list(range(ROWS))


def test_length_is_the_whole_epoch_wherever_it_starts() -> None:
    order = GlobalOrder(ROWS, GLOBAL, 3, 1, 2, consumed=lambda: 30)
    assert len(order) == len(list(order)) == ROWS // GLOBAL * 2


def test_the_first_batch_can_be_repeated() -> None:
    order = GlobalOrder(ROWS, GLOBAL, 6, repeat_first_batch=True)
    batches = list(order)
    assert batches[0] != batches[1]
    assert batches == batches[:2] * 4


@pytest.mark.parametrize(("rows", "world_size", "micro"), [(1, 1, 1), (7, 2, 2), (8, 2, 2), (9, 2, 2), (3, 4, 8)])
def test_evaluation_reads_every_row_once_in_equally_many_full_batches(rows: int, world_size: int, micro: int) -> None:
    ranks = [list(EvalOrder(rows, micro, rank, world_size)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(EvalOrder(rows, micro, 0, world_size))}
    assert all(len(batch) == micro for batches in ranks for batch in batches)
    read = sorted(itertools.chain(*itertools.chain(*ranks)))
    assert [row for row in read if row != PADDING] == list(range(rows))
    assert len(read) - rows < world_size * micro  # no more padding than it takes


def test_jumped_intervals_are_read_by_nobody_and_all_else_once() -> None:
    rows, size = 20, 4
    jumps = with_jumps([(30, 34)], [(4, 8), (8, 10)])
    assert jumps == [(4, 10), (30, 34)]
    assert [stream_position(i, jumps) for i in (0, 3, 4, 5, 23, 24)] == [0, 3, 10, 11, 29, 34]
    ranks = [GlobalOrder(rows, size, 2, rank, 2, 0, lambda: 0, jumps=lambda: jumps) for rank in (0, 1)]
    read = [row for batches in zip(*ranks, strict=True) for batch in batches for row in batch]
    stream = [int(permutation(rows, 0, epoch)[i]) for epoch in (0, 1) for i in range(rows)]
    assert read == (stream[:4] + stream[10:30])[: len(read)]
