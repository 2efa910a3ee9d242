"""Paired statistics: two models have values for the same samples, documents or questions.

The interval is a bootstrap over samples: the tokens of one document depend on each other. It is
widened for few samples (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, 4.6.2).
Requirements on comparisons, for CI: `eval/loss better`, `accuracy not worse by 0.01`.

Shapes: R runs of one configuration, S samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import InputError

RESAMPLES, BATCH_VALUES = 10_000, 2**22
LEAST = 20  # samples: of fewer, even the widened interval is too short
LEVEL, POWER = 0.05, 0.8
SCALED = ("run", "baseline", "difference", "low", "high", "detectable")  # fields with a unit
ROUNDING = 1e-4  # of the figure: what strategies and kernels may differ by
REQUIREMENT = re.compile(r"(\S+) (better|not worse by (\d*\.?\d+))")
NORMAL = 1.959964  # standard errors to each end of a 95 % interval


@dataclass(frozen=True)
class Pair:
    """A measure of runs and baselines, (R, S); a figure is a sum of values over one of weights."""

    name: str
    run: np.ndarray
    baseline: np.ndarray
    weights: np.ndarray  # (S,): bytes, tokens, or ones
    lower_is_better: bool = True


@dataclass
class Comparison:
    """The difference of a measure with its 95 % interval, `low` to `high`.

    `detectable` is the smallest difference that these samples show with a power of 80 %.
    """

    name: str
    samples: int
    lower_is_better: bool
    run: float
    baseline: float
    difference: float
    low: float
    high: float
    detectable: float
    p: float
    verdict: str = ""
    sentence: str = ""

    def decide(self) -> None:
        """Sets the verdict and its sentence."""
        self.verdict = "cannot tell"
        if self.p < LEVEL and abs(self.difference) > ROUNDING * abs(self.baseline):
            is_better = (self.difference < 0) == self.lower_is_better
            self.verdict = "better" if is_better else "worse"
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
    margin = None
    if found[3]:
        margin = float(found[3])
    return re.sub("^(eval|test)/", "", found[1]), margin


def failure(requirement: str, comparisons: Sequence[Comparison]) -> str | None:
    """Returns why a requirement does not hold, in one sentence; None: it holds.

    Raises:
        InputError: its measure was not compared, or a task has to be named.
    """
    name, margin = parse(requirement)
    found = [each for each in comparisons if f"/{each.name}".endswith(f"/{name}")]
    if len(found) != 1:
        known = ", ".join(each.name for each in comparisons)
        why = "other tokens cannot be compared" if name == "loss" else "it is not one measure"
        raise InputError(f"--require {requirement!r}: {why}; give one of {known}")
    (each,) = found
    worse = each.high if each.lower_is_better else -each.low
    if (margin is None and each.verdict == "better") or (margin is not None and worse <= margin):
        return None
    return f"required {requirement!r}, but {each.sentence}"


def compare(pairs: list[Pair]) -> list[Comparison]:
    """Returns a comparison of each measure, with p corrected for their number (Holm, 1979)."""
    found, least = [_compared(pair, len(pairs)) for pair in pairs], 0.0
    for rank, each in enumerate(sorted(found, key=lambda one: one.p)):
        least = each.p = min(1.0, max(least, (len(found) - rank) * each.p))
        each.decide()
    return found


def _compared(pair: Pair, num_tests: int) -> Comparison:
    from scipy import stats

    rng, num, total = np.random.default_rng(0), len(pair.weights), pair.weights.sum()
    values = pair.run.mean(0) - pair.baseline.mean(0)  # (S,)
    resampled: Any = stats.bootstrap(
        (values, pair.weights), lambda v, w, axis: v.sum(axis) / w.sum(axis), paired=True,
        n_resamples=RESAMPLES, batch=max(1, BATCH_VALUES // num), method="percentile", rng=rng,
    ).bootstrap_distribution  # fmt: skip
    difference = values.sum() / total
    widened = stats.t.ppf(1 - LEVEL / 2, num - 1) / NORMAL * math.sqrt(num / (num - 1))
    resampled = difference + (resampled - difference) * widened
    for group in (pair.run, pair.baseline):
        if len(group) > 1:  # the standard error of seeds, by Student's t with R - 1 degrees
            error = (group.sum(1) / total).std(ddof=1) / math.sqrt(len(group))
            resampled += error * rng.standard_t(len(group) - 1, RESAMPLES)
    low, high = np.quantile(resampled, [LEVEL / 2, 1 - LEVEL / 2])
    p = min(1.0, 2 * (min((resampled <= 0).sum(), (resampled >= 0).sum()) + 1) / RESAMPLES)
    powers = stats.norm.ppf(1 - LEVEL / 2 / num_tests) + stats.norm.ppf(POWER)
    detectable = powers * (high - low) / 2 / NORMAL
    every = np.concatenate([pair.run, pair.baseline])
    if len(every) == 2 and np.isin(every, (0, 1)).all():  # right or wrong: McNemar's exact test
        gained, lost = int((values > 0).sum()), int((values < 0).sum())
        p = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
        # x = powers * sqrt((unequal share + x) / num), where 1 / num is Edwards' correction
        share, scale = (gained + lost + 1) / num, powers**2 / num
        detectable = 1 / num + (scale + math.sqrt(scale**2 + 4 * scale * share)) / 2
    figures = [group.mean(0).sum() / total for group in (pair.run, pair.baseline)]
    plain: Any = map(float, (*figures, difference, low, high, detectable, p))
    return Comparison(pair.name, num, pair.lower_is_better, *plain)
