"""Paired statistics: two models have values for the same samples, documents or questions.

The interval is Student's t over samples, because the tokens of one document depend on each other.
Requirements on comparisons, for CI: `eval/loss better`, `accuracy not worse by 0.01`."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....errors import InputError

LEAST = 20  # samples
LEVEL, POWER = 0.05, 0.8
ROUNDING = 1e-4  # share of the figure by which strategies and kernels may differ
REQUIREMENT = re.compile(r"(\S+) (better|not worse by (\d*\.?\d+))")


@dataclass
class Comparison:
    """The difference of a measure with its 95 % interval, `low` to `high`. `detectable` is the
    smallest difference that these samples show with a power of 80 %."""

    name: str
    samples: int
    lower_is_better: bool
    run: float
    baseline: float
    difference: float
    low: float
    high: float
    detectable: float
    verdict: str
    sentence: str = ""

    def __post_init__(self) -> None:
        values = f"{self.name} {self.run:.4f} against {self.baseline:.4f}"
        interval = f"{self.difference:+.4f}, 95 % interval {self.low:+.4f} to {self.high:+.4f}"
        self.sentence = f"{self.verdict} with {self.samples:,} samples: {values} ({interval})"
        if self.verdict == "cannot tell":
            self.sentence += f"; they would show a difference of {self.detectable:.4f}"


def parse(requirement: str) -> tuple[str, float | None]:
    """Returns the measure's name, and by how much it may be worse; None: it must be better."""
    found = REQUIREMENT.fullmatch(requirement.strip())
    if not found:
        allowed = "'MEASURE better' or 'MEASURE not worse by 0.01', such as 'eval/loss better'"
        raise InputError(f"--require {requirement!r} is no requirement: write {allowed}")
    name = re.sub("^(eval|test)/", "", found[1])
    margin = float(found[3]) if found[3] else None
    return name, margin


def failure(requirement: str, comparisons: Sequence[Comparison]) -> str | None:
    """Returns why a requirement does not hold, in one sentence; None: it holds. Raises InputError
    if its measure was not compared, or a task has to be named."""
    name, margin = parse(requirement)
    found = [each for each in comparisons if f"/{each.name}".endswith(f"/{name}")]
    if len(found) != 1:
        known = ", ".join(each.name for each in comparisons)
        why = "other tokens cannot be compared" if name == "loss" else "it is not one measure"
        raise InputError(f"--require {requirement!r}: {why}; give one of {known}")
    (each,) = found
    if margin is None:
        holds = each.verdict == "better"
    else:
        # The end of the interval at which the run is worst.
        worst = each.high if each.lower_is_better else -each.low
        holds = worst <= margin
    if holds:
        return None
    return f"required {requirement!r}, but {each.sentence}"


def compare(
    name: str,
    run: np.ndarray,
    baseline: np.ndarray,
    weights: np.ndarray,
    lower_is_better: bool = True,
    num_tests: int = 1,
) -> Comparison:
    """Compares a measure of run and baseline, (S,); a figure is a sum of values over one of
    weights. The verdict is corrected for the number of tests (Bonferroni)."""
    from scipy import stats

    num, total = len(weights), weights.sum()
    values = run - baseline
    difference = values.sum() / total
    # The standard error of a ratio of sums, by its linear approximation
    residuals = values - difference * weights
    error = math.sqrt((residuals**2).sum() * num / (num - 1)) / total
    correction = 0.0
    if np.isin([run, baseline], (0, 1)).all():  # right or wrong: Edwards' correction
        correction = 1 / num
    margin = stats.t.ppf(1 - LEVEL / 2, num - 1) * error + correction
    critical = stats.t.ppf(1 - LEVEL / 2 / num_tests, num - 1)
    ours, theirs = run.sum() / total, baseline.sum() / total
    verdict = "cannot tell"
    if abs(difference) > max(critical * error + correction, ROUNDING * abs(theirs)):
        verdict = "better" if (difference < 0) == lower_is_better else "worse"
    detectable = (critical + stats.norm.ppf(POWER)) * error + correction
    return Comparison(
        name,
        num,
        lower_is_better,
        run=float(ours),
        baseline=float(theirs),
        difference=float(difference),
        low=float(difference - margin),
        high=float(difference + margin),
        detectable=float(detectable),
        verdict=verdict,
    )
