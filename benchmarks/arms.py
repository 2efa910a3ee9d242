"""What is compared runs in one process, each round in a new order, so that drift of the machine
meets all alike.

CPU time of the process is beside wall time: other work on the machine hardly changes the first. The
ratio of two arms is taken within each round, and the median of these ratios is reported with the
smallest and the largest; of more than 20 rounds, such as turns of some tenths of a second, with the
95 % interval of the median.
"""

import contextlib
import gc
import io
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """What one unit of work (an optimizer step, a save, a process) took."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class InTurns(Sample):
    """What an arm took on average, and in each of its turns."""

    turns: tuple[Sample, ...]


class Clock:
    """CPU seconds of this process, all threads, and wall seconds, from `start` to `stop`."""

    def start(self) -> None:
        self._began = time.process_time(), time.perf_counter()

    def stop(self) -> Sample:
        return Sample(time.process_time() - self._began[0], time.perf_counter() - self._began[1])


@dataclass
class Comparison:
    """Arms that did the same work, round by round, each beside the arm `reference`."""

    title: str
    unit: str  # of work
    reference: str
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # of each arm, one per round

    def cpu_ratios(self, arm: str, to: str | None = None) -> list[float]:
        """CPU time of `arm` over `to` (the reference), per round; above 1 is slower."""
        return [a.cpu_s / b.cpu_s for a, b in self._pairs(arm, to)]

    def wall_ratios(self, arm: str, to: str | None = None) -> list[float]:
        return [a.wall_s / b.wall_s for a, b in self._pairs(arm, to)]

    def cpu_added(self, arm: str) -> list[float]:
        """CPU seconds per unit that `arm` takes more than the reference, per round."""
        return [a.cpu_s - b.cpu_s for a, b in self._pairs(arm)]

    def _pairs(self, arm: str, to: str | None = None) -> Iterator[tuple[Sample, Sample]]:
        return zip(self.samples[arm], self.samples[to or self.reference], strict=True)


Arm = Callable[[], Sample]  # warms itself up, then measures itself


def compare(
    comparison: Comparison, arms: dict[str, Arm], rounds: int, warm: bool = True
) -> Comparison:
    """Runs every arm in each round, and once before without a record (`warm`): what is imported
    late is then there."""
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
        print(
            f"  {comparison.title}: round {number} of {rounds}{'' if number else ' (warms up)'}",
            flush=True,
        )
    return comparison


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keeps standard output and error back; shows them when what is inside fails."""
    kept = io.StringIO()
    try:
        with contextlib.redirect_stdout(kept), contextlib.redirect_stderr(kept):
            yield
    except BaseException:
        sys.stderr.write(kept.getvalue())
        raise


MANY = 20  # values of which the interval of the median says more than the smallest and the largest


def interval(values: list[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median, by the order of the values (David and Nagaraja,
    Order Statistics, 2003, section 7.1: the number of values below the median is binomial)."""
    ordered, count = sorted(values), len(values)
    apart = 1.96 * math.sqrt(count) / 2
    low, high = math.floor(count / 2 - apart), math.ceil(count / 2 + apart)
    return ordered[max(0, low)], ordered[min(count - 1, high)]


def described(values: list[float], digits: int = 2) -> str:
    """Median, smallest to largest; of many values, the 95 % interval of the median."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    low, high = interval(values) if len(values) > MANY else (min(values), max(values))
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
