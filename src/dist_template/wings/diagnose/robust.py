"""Robust statistics: medians, and trends over medians, which single outliers do not change.

All functions take finite values. A `Series` has N entries, ordered by optimizer step."""

import numpy as np

from ..history import Series

MAD_TO_SIGMA = 1.4826  # of a normal distribution
NUM_BINS = 30  # medians that represent a curve: enough for its shape, with 435 pairs for a trend


def median(values: np.ndarray) -> float:
    if not len(values):
        return float("nan")
    return float(np.median(values))


def noise(values: np.ndarray) -> float:
    """Returns the standard deviation between neighbours, without trend and single spikes."""
    if len(values) < 3:
        return 0.0
    steps = np.diff(values)
    return MAD_TO_SIGMA * median(np.abs(steps - median(steps))) / 2**0.5


def head(series: Series) -> float:
    """Returns the median of the first tenth, of at least 3 and at most 50 entries."""
    return median(series.values[: min(max(3, len(series) // 10), 50)])


def tail(series: Series) -> float:
    return head(series[::-1])


def running_median(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the (N,) medians over each value and its neighbours, `width` (odd) values each."""
    padded = np.pad(values, width // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)


def span(series: Series) -> tuple[int, int]:
    """Returns the first and the last step."""
    return int(series.steps[0]), int(series.steps[-1])


def binned(series: Series) -> Series:
    """Returns the medians of at most `NUM_BINS` equal parts."""
    if len(series) <= NUM_BINS:
        return series
    steps = np.array_split(series.steps, NUM_BINS)
    values = np.array_split(series.values, NUM_BINS)
    return Series(np.array(list(map(median, steps))), np.array(list(map(median, values))))


def rising_share(series: Series) -> float:
    """Returns the share of pairs whose later median is higher: 0.5 without a trend, at most 1."""
    values = binned(series).values
    first, second = np.triu_indices(len(values), 1)
    if not len(first):
        return 0.5
    return float(np.mean(np.sign(values[second] - values[first]) + 1) / 2)


def rounded(value: float) -> float:
    """Rounds to one significant digit."""
    return float(f"{value:.0e}")
