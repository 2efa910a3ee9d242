"""Even work: ranks get equally expensive samples, and training has the same numbers as one process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.callbacks import equal_work
from dist_template.text.batches.rows import ATTENTION_TOKENS
from tests.support.library import PackedRows
from tests.support.parity import SHORT, Trainings
from tests.support.tiers import tiers

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)


@PROPERTY
@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_every_sample_is_assigned_once_and_ranks_differ_by_at_most_one_sample(
    accumulation: int, counts: list[int], data: st.DataObject
) -> None:
    num = accumulation * sum(counts)
    costs = data.draw(st.lists(st.floats(0, 1e6), min_size=num, max_size=num))
    assigned = equal_work.assign(costs, accumulation, counts, counts)
    every = [sample for rank in assigned for batch in rank for sample in batch]
    assert sorted(every) == [*range(num)]
    for batches, count in zip(assigned, counts, strict=True):
        assert [len(batch) for batch in batches] == [count] * accumulation
    if len(set(counts)) == 1:
        work = [sum(costs[sample] for batch in rank for sample in batch) for rank in assigned]
        assert max(work) - min(work) <= max(costs) * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [8, 64])
def test_the_slowest_rank_has_little_more_than_the_mean(ranks: int) -> None:
    """Lengths as of conversations: their logarithm is normal."""
    costs = np.random.default_rng(0).lognormal(6.0, 0.8, ranks * 16)
    assigned = equal_work.assign(costs, 4, [4] * ranks, [1.0] * ranks)
    work = np.array([costs[sum(rank, [])].sum() for rank in assigned])
    in_order = costs.reshape(ranks, -1).sum(1)
    assert work.max() / work.mean() < 1.02 < 1.3 < in_order.max() / in_order.mean()


@PROPERTY
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.integers(0, 100))
def test_samples_are_shared_in_proportion_to_speed(speeds: list[float], samples: int) -> None:
    counts = equal_work.shared_out(samples, speeds)
    assert sum(counts) == samples
    assert all(abs(count - samples * speed / sum(speeds)) < 1 for count, speed in zip(counts, speeds, strict=True))


def test_a_row_costs_its_tokens_and_the_squares_of_its_documents() -> None:
    """Rows of 8 tokens with EOS 0: documents of 8; of 4 and 4; of 1 and 7."""
    tokens = np.array([[5] * 8, [5, 5, 5, 0] + [5] * 4, [0] + [5] * 7]).ravel()
    rows = PackedRows(np.append(tokens, 5), 8, 0)
    squares = np.array([64, 32, 50])
    assert rows.work([2, 0, 1]) == pytest.approx(8 + squares[[2, 0, 1]] / ATTENTION_TOKENS)
    across = PackedRows(rows.tokens, 8, 0, cross_document_attention=True)
    assert across.work([0, 1]).tolist() == [8, 8]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2", "zero2", "fsdp2_ep"], daily=["fsdp2"]))
def test_balanced_and_uneven_ranks_train_to_the_numbers_of_one_process(train: Trainings, strategy: str) -> None:
    """Rank 0 gets three rows of each micro-batch, rank 1 one; labels are masked unevenly."""
    model = "deepseek_v3" if strategy.endswith("ep") else "llama"
    flags = ["--data.balance=true", "--data.rank_speeds=[3, 1]", SHORT]
    one, even = train(model, "one", SHORT), train(model, strategy, *flags)
    assert even.loss == pytest.approx(one.loss, rel=1e-5)
    assert even.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    for step, rows in even.rows().items():
        assert sorted(row for row, _ in rows) == sorted(row for row, _ in one.rows()[step])
        assert [rank for _, rank in rows] == [0] * 6 + [1] * 2


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ([1.0], r"data.rank_speeds is \[1.0\]: give one number above 0 for each of the 2"),
        ([1.0, 0.0], "give one number above 0"),
        ([100.0, 1.0], "leaves rank 1 without a row of the 16"),
    ],
)
def test_speeds_that_cannot_be_are_refused(speeds: list[float], message: str) -> None:
    data = DataModule(global_batch_size=32, micro_batch_size=8, rank_speeds=speeds)
    with pytest.raises(InputError, match=message):
        data.check(world_size=2)
