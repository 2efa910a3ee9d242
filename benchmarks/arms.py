"""What is compared runs in one process, each round in a new order, so that drift of the machine meets all alike.

CPU time of the process stands beside wall time: other work on the machine leaves the first nearly alone. An arm is set
against another within each round, and the median of these ratios is reported with the smallest and the largest.
"""

from __future__ import annotations

import contextlib
import gc
import io
import random
import statistics
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """What one unit of work (an optimizer step, a token, a save) took."""

    cpu_s: float
    wall_s: float


class Clock:
    """CPU seconds of this process, all threads, and wall seconds, from `start` to `stop`."""

    def start(self) -> None:
        self._began = time.process_time(), time.perf_counter()

    def stop(self, units: int = 1) -> Sample:
        """Per unit of work."""
        cpu, wall = time.process_time(), time.perf_counter()
        return Sample((cpu - self._began[0]) / units, (wall - self._began[1]) / units)


@dataclass
class Comparison:
    """Arms that did the same work, round by round.

    Args:
        title: What they did.
        unit: Of work.
        reference: The arm that the others are set against.
        samples: Of each arm, one per round.
    """

    title: str
    unit: str
    reference: str
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def cpu_ratios(self, arm: str, to: str | None = None) -> list[float]:
        """CPU time of `arm` over `to` (the reference), per round; above 1 is slower."""
        return self._each(arm, to, lambda a, b: a.cpu_s / b.cpu_s)

    def wall_ratios(self, arm: str, to: str | None = None) -> list[float]:
        """The same of wall time."""
        return self._each(arm, to, lambda a, b: a.wall_s / b.wall_s)

    def speeds(self, arm: str, to: str | None = None) -> list[float]:
        """Speed of `arm` as a share of `to` (the reference), by wall time, per round; below 1 is slower."""
        return self._each(arm, to, lambda a, b: b.wall_s / a.wall_s)

    def cpu_added(self, arm: str) -> list[float]:
        """CPU seconds per unit that `arm` takes more than the reference, per round."""
        return self._each(arm, None, lambda a, b: a.cpu_s - b.cpu_s)

    def _each(self, arm: str, to: str | None, of: Callable[[Sample, Sample], float]) -> list[float]:
        pairs = zip(self.samples[arm], self.samples[to or self.reference], strict=True)
        return [of(a, b) for a, b in pairs]


Arm = Callable[[], Sample]  # warms itself up, then measures itself


def compare(comparison: Comparison, arms: dict[str, Arm], rounds: int, warm: bool = True) -> Comparison:
    """Run every arm in each round; what they print is kept back, and shown when one fails.

    Args:
        comparison: Filled and returned.
        arms: By name.
        rounds: At least 1.
        warm: Run each once before and forget it: what is imported late is then there for all.
    """
    comparison.samples = {name: [] for name in arms}
    for number in range(0 if warm else 1, rounds + 1):
        for name in random.sample(sorted(arms), len(arms)):
            gc.collect()  # no arm pays for another's garbage
            gc.unfreeze()
            gc.enable()
            with quiet():
                sample = arms[name]()
            if number:
                comparison.samples[name].append(sample)
        print(f"  {comparison.title}: round {number} of {rounds}{'' if number else ' (warms up)'}", flush=True)
    return comparison


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keep standard output and error back; show them when what is inside fails."""
    kept = io.StringIO()
    try:
        with contextlib.redirect_stdout(kept), contextlib.redirect_stderr(kept):
            yield
    except BaseException:
        sys.stderr.write(kept.getvalue())
        raise


def described(values: list[float], digits: int = 2) -> str:
    """Median, smallest to largest."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
