"""No difference is rarely found, and a planted one with the promised power."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dist_template import InputError
from dist_template.wings.ship.evaluate import paired

SIMULATIONS = 200
Measure = tuple[str, np.ndarray, np.ndarray, np.ndarray, bool]


def losses(rng: np.random.Generator, documents: int, shift: float = 0.0) -> Measure:
    """Two models' nats of documents of very unequal lengths, whose difficulty both share."""
    sizes = np.ceil(rng.lognormal(6, 1, documents))
    shared = rng.gamma(4, 0.3, documents)
    run, baseline = (sizes * (shared + rng.normal(0, 0.05, documents)) for _ in range(2))
    return "loss", run + shift * sizes, baseline, sizes, True


def answers(rng: np.random.Generator, questions: int, shift: float = 0.0) -> Measure:
    right = rng.random(questions)
    run = np.where(rng.random(questions) < 0.3, rng.random(questions), right) < 0.6 + shift
    return "acc", run * 1.0, (right < 0.6) * 1.0, np.ones(questions), False


@pytest.mark.parametrize(("make", "sign"), [(losses, -1), (answers, 1)])
def test_no_difference_is_rarely_found_and_a_planted_one_with_the_promised_power(
    make: Any, sign: int
) -> None:
    for num in (20, 100):
        rng = np.random.default_rng(1)
        verdicts = [paired.compare(*make(rng, num)).verdict for _ in range(SIMULATIONS)]
        assert verdicts.count("better") <= SIMULATIONS * 0.05
        assert verdicts.count("cannot tell") >= SIMULATIONS * 0.9
    seeds = map(np.random.default_rng, range(20))
    detectable = np.median([paired.compare(*make(rng, 200)).detectable for rng in seeds])
    rng = np.random.default_rng(2)
    planted = [make(rng, 200, sign * detectable) for _ in range(SIMULATIONS)]
    found = [paired.compare(*each).verdict for each in planted]
    assert found.count("better") >= SIMULATIONS * (paired.POWER - 0.1)
    assert found.count("worse") == 0


def test_the_interval_holds_the_planted_difference_and_needs_pairs() -> None:
    rng = np.random.default_rng(3)
    found = [paired.compare(*losses(rng, 100, 0.01)) for _ in range(SIMULATIONS)]
    assert sum(each.low <= 0.01 <= each.high for each in found) >= SIMULATIONS * 0.9
    name, run, *others = losses(rng, 100, 0.05)
    assert paired.compare(name, run, *others).verdict == "worse"
    assert paired.compare(name, run[::-1], *others).verdict == "cannot tell", "by documents"
    _, run, _, weights, _ = losses(np.random.default_rng(6), 100)
    rounded, better = (paired.compare("loss", run * (1 - by), run, weights) for by in (1e-6, 1e-3))
    assert (rounded.verdict, better.verdict) == ("cannot tell", "better")
    assert better.sentence.startswith("better with 100 samples: loss ")


def test_verdicts_of_tasks_are_corrected_for_their_number() -> None:
    rng = np.random.default_rng(4)
    pair = answers(rng, 300)
    assert paired.compare(*pair, 8).detectable > paired.compare(*pair).detectable
    null = [[paired.compare(*answers(rng, 60), 8) for _ in range(8)] for _ in range(50)]
    assert sum(any(each.verdict == "better" for each in family) for family in null) <= 5


def a(name: str, lower: bool, low: float, high: float, verdict: str) -> paired.Comparison:
    means = (1.0, 1.0, (low + high) / 2)
    return paired.Comparison(name, 50, lower, *means, low, high, 0.1, verdict)


FOUND = [a("loss", True, -0.2, -0.1, "better"), a("fox/acc", False, -0.02, 0.03, "cannot tell")]
HOLDS = {"eval/loss better": True, "loss not worse by 0": True, "acc better": False}
HOLDS |= {"acc not worse by 0.03": True, "fox/acc not worse by 0.01": False}


@pytest.mark.parametrize("text", HOLDS)
def test_a_requirement_holds_or_says_why_not(text: str) -> None:
    why = paired.failure(text, FOUND)
    assert (why is None) == HOLDS[text] and (why is None or text in why and "cannot tell" in why)


def test_a_requirement_that_cannot_be_judged_is_refused() -> None:
    for text in ("loss", "loss is better", "loss not worse", "loss not worse by much", ""):
        with pytest.raises(InputError, match="is no requirement: write 'MEASURE better'"):
            paired.parse(text)
    with pytest.raises(InputError, match="give one of loss, fox/acc"):
        paired.failure("exact_match better", FOUND)
    with pytest.raises(InputError, match="other tokens cannot be compared"):
        paired.failure("loss better", FOUND[1:])
