"""Packing of whole documents: none is cut, rows are full, and it takes seconds for a million."""

from __future__ import annotations

import numpy as np
import pytest

from dist_template.text.batches.rows import best_fit


def log_normal(number: int, median: float, sigma: float, seed: int = 0) -> np.ndarray:
    """Lengths of conversations: a log-normal distribution describes published sets well."""
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(median), sigma, number))
    return np.maximum(lengths.astype(np.int64), 8)


@pytest.mark.parametrize(
    ("median", "sigma", "seq_len"), [(250, 0.9, 2048), (700, 0.8, 4096), (60, 1.2, 1024)]
)
def test_rows_are_at_least_98_percent_full_and_hold_every_item_once(
    median: int, sigma: float, seq_len: int
) -> None:
    sizes = np.minimum(log_normal(20_000, median, sigma), seq_len)
    rows = best_fit(sizes, seq_len)
    assert sorted(item for row in rows for item in row) == [*range(len(sizes))]
    assert max(int(sizes[row].sum()) for row in rows) <= seq_len
    assert sizes.sum() / (len(rows) * seq_len) >= 0.98


def test_it_is_best_fit_decreasing() -> None:
    assert best_fit(np.array([4, 7, 3, 6]), 10) == [[0, 3], [1, 2]]
    assert best_fit(np.array([5, 5, 5, 10, 1]), 10) == [[0, 1], [2, 4], [3]]
    assert best_fit(np.array([], dtype=np.int64), 10) == []
