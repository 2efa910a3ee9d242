"""Metrics over steps, in memory, and `metrics.jsonl`, which has a line for each log call.

A line: {"step": 40, "time": 1763766000.1, "train/loss": 2.31, …}. Steps are optimizer steps, times
seconds since 1970. A resumed run appends. For steps that it repeats, the newer line counts.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Series"]

FILE = "metrics.jsonl"
MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, of a normal distribution


@dataclass(frozen=True)
class Series:
    """One metric. All arrays have N entries, in the order of their steps."""

    steps: np.ndarray  # int64
    values: np.ndarray  # float64; NaN and infinities are kept
    times: np.ndarray  # float64, seconds since 1970

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        return float(self.values[-1])

    def finite(self) -> Series:
        return self[np.isfinite(self.values)]

    def __getitem__(self, which: Any) -> Series:
        """Returns a part of the series, by a slice, a mask or indices."""
        return Series(self.steps[which], self.values[which], self.times[which])


@dataclass
class Metrics:
    """Every metric of a run."""

    limit: int = 0  # of entries of a metric; beyond it, every second one of the older half is dropped. 0: none
    # steps, values, times: arrays, which NumPy copies faster than lists
    _columns: dict[str, tuple[array[int], array[float], array[float]]] = field(default_factory=dict)

    def add(self, line: dict[str, Any]) -> None:
        step, time = int(line["step"]), float(line["time"])
        for name, value in line.items():
            if name in ("step", "time") or not isinstance(value, int | float):
                continue
            if name not in self._columns:
                self._columns[name] = _empty()
            steps, values, times = self._columns[name]
            if steps and steps[-1] >= step:  # a resumed run repeats these steps
                for column in (values, times, steps):
                    del column[bisect_left(steps, step) :]
            steps.append(step)
            values.append(float(value))
            times.append(time)
            if self.limit and len(steps) > self.limit:
                for column in (steps, values, times):
                    del column[: self.limit // 2 : 2]

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def __getitem__(self, name: str) -> Series:
        """Returns the metric; an empty series if it was never logged."""
        steps, values, times = self._columns.get(name) or _empty()
        return Series(np.array(steps, dtype=np.int64), np.array(values), np.array(times))


def _empty() -> tuple[array[int], array[float], array[float]]:
    return array("q"), array("d"), array("d")


def is_number(value: Any) -> bool:
    """Returns whether a step, a time or a duration is one."""
    return isinstance(value, int | float) and -(2**53) < value < 2**53


def _integer(digits: str) -> float:
    return int(digits) if len(digits) < 20 else float(digits)  # float() of a longer int may fail


def read_lines(path: Path, *numbers: str) -> list[dict[str, Any]]:
    """Returns the objects of a JSONL file, if it exists; incomplete and damaged lines are skipped.

    `numbers` are keys that an object must have with a number.
    """
    if not path.exists():
        return []
    found = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                read = json.loads(line, parse_int=_integer)
                if isinstance(read, dict) and all(is_number(read[key]) for key in numbers):
                    found.append(read)
            except (ValueError, LookupError, TypeError, RecursionError):
                continue
    return found


def read_metrics(run: Path, limit: int = 0) -> Metrics:
    metrics = Metrics(limit)
    for line in read_lines(run / FILE, "step", "time"):
        metrics.add(line)
    return metrics
