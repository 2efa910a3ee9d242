"""Robust statistics: medians, and trends over medians, which single outliers do not change.

All functions take finite values. A `Series` has N entries, ordered by optimizer step.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from ...observe.history.metrics import Series

MAD_TO_SIGMA = 1 / NormalDist().inv_cdf(0.75)  # of a normal distribution
NUM_BINS = 30  # medians that represent a curve: enough for its shape, with 435 pairs for a trend


def median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def noise(values: np.ndarray) -> float:
    """Returns the standard deviation between neighbours, without trend and single spikes."""
    if len(values) < 3:
        return 0.0
    steps = np.diff(values)
    return MAD_TO_SIGMA * median(np.abs(steps - median(steps))) / 2**0.5


def window(series: Series) -> int:
    """Returns how many entries `head` and `tail` take: a tenth, at least 3 and at most 50."""
    return min(max(3, len(series) // 10), 50)


def head(series: Series) -> float:
    return median(series.values[: window(series)])


def tail(series: Series) -> float:
    return median(series.values[-window(series) :])


def running_median(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the (N,) medians over each value and its neighbours, `width` (odd) values each."""
    padded = np.pad(values, width // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)


def span(series: Series) -> tuple[int, int]:
    """Returns the first and the last step."""
    return int(series.steps[0]), int(series.steps[-1])


def later(series: Series, step: float) -> Series:
    return series[series.steps > step]


def binned(series: Series, num: int = NUM_BINS) -> Series:
    """Returns the medians of at most `num` equal parts."""
    if len(series) <= num:
        return series
    parts = np.array_split(np.arange(len(series)), num)
    columns = (series.steps, series.values, series.times)
    return Series(*(np.array([median(column[part]) for part in parts]) for column in columns))


def rising_share(series: Series) -> float:
    """Returns the share of pairs whose later median is higher: 0.5 without a trend, at most 1."""
    values = binned(series).values
    first, second = np.triu_indices(len(values), 1)
    return float(np.mean(np.sign(values[second] - values[first]) + 1) / 2) if len(first) else 0.5


def rounded(value: float, digits: int = 1) -> float:
    """Rounds to `digits` significant digits."""
    return float(f"{value:.{digits - 1}e}")
