"""Statistics that a few odd values do not move: medians, and slopes over medians.

Every function takes finite values; a `Series` has N entries over optimizer steps.
"""

from __future__ import annotations

import numpy as np

from ..history.metrics import Series

MAD_TO_SIGMA = 1.4826  # of a normal distribution, whose median absolute deviation is sigma / 1.4826
BINS = 30  # medians that stand for a whole curve: enough for its shape, and 435 pairs for a slope


def median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def noise(values: np.ndarray) -> float:
    """How far a value lies from its neighbours, as a standard deviation; a trend does not count, nor single spikes."""
    if len(values) < 3:
        return 0.0
    steps = np.diff(values)
    return MAD_TO_SIGMA * median(np.abs(steps - median(steps))) / 2**0.5


def window(series: Series) -> int:
    """Entries whose median is one end of a curve: a tenth of it, 3 at least and 50 at most."""
    return min(max(3, len(series) // 10), 50)


def head(series: Series) -> float:
    return median(series.values[: window(series)])


def tail(series: Series) -> float:
    return median(series.values[-window(series) :])


def running_median(values: np.ndarray, width: int) -> np.ndarray:
    """(N,) the median of each value and its neighbours, `width` (odd) in all."""
    padded = np.pad(values, width // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)


def span(series: Series) -> tuple[int, int]:
    """The first and the last step."""
    return int(series.steps[0]), int(series.steps[-1])


def later(series: Series, step: float) -> Series:
    """What comes after `step`."""
    return series[series.steps > step]


def binned(series: Series, num: int = BINS) -> Series:
    """At most `num` entries: medians of as many equal parts."""
    if len(series) <= num:
        return series
    parts = np.array_split(np.arange(len(series)), num)
    columns = [[median(column[part]) for part in parts] for column in (series.steps, series.values, series.times)]
    return Series(*(np.array(column) for column in columns))


def slope(series: Series) -> float:
    """Per step: the median over all pairs of medians (Theil 1950, Sen 1968). 0 for less than two."""
    if len(series) < 2:
        return 0.0
    few = binned(series)
    first, second = np.triu_indices(len(few), 1)
    return median((few.values[second] - few.values[first]) / (few.steps[second] - few.steps[first]))


def rising_share(series: Series) -> float:
    """Of all pairs of medians, in how many the later one is higher: 0.5 without a trend, 1 when it only rises."""
    few = binned(series)
    first, second = np.triu_indices(len(few), 1)
    return float(np.mean(few.values[second] > few.values[first])) if len(first) else 0.5


def at(series: Series, step: float) -> float:
    """The value at `step`, or the newest before it; the first one where there is none before."""
    return float(series.values[max(0, int(np.searchsorted(series.steps, step, side="right")) - 1)])


def rounded(value: float, digits: int = 1) -> float:
    """To so many significant digits, as a person would choose a setting."""
    return float(f"{value:.{digits - 1}e}")
