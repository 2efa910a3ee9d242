"""The statistics of `evaluate`: no difference is rarely found, a planted one is, with the power that was promised."""

from __future__ import annotations

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


@pytest.mark.parametrize("make", [losses, answers])
@pytest.mark.parametrize("num", [20, 100])
def test_no_difference_comes_out_better_in_at_most_a_twentieth(make, num: int) -> None:
    rng = np.random.default_rng(1)
    verdicts = [paired.compare(*make(rng, num)).verdict for _ in range(SIMULATIONS)]
    assert verdicts.count("better") <= SIMULATIONS * 0.05
    assert verdicts.count("cannot tell") >= SIMULATIONS * 0.9


@pytest.mark.parametrize("make, sign", [(losses, -1), (answers, 1)])
def test_a_planted_difference_is_found_with_the_promised_power(make, sign: int) -> None:
    detectable = np.median(
        [paired.compare(*make(np.random.default_rng(seed), 200)).detectable for seed in range(20)]
    )
    rng = np.random.default_rng(2)
    found = [paired.compare(*make(rng, 200, sign * detectable)).verdict for _ in range(SIMULATIONS)]
    assert found.count("better") >= SIMULATIONS * (paired.POWER - 0.1)
    assert found.count("worse") == 0


def test_the_interval_holds_the_planted_difference_and_needs_pairs() -> None:
    rng = np.random.default_rng(3)
    found = [paired.compare(*losses(rng, 100, 0.01)) for _ in range(SIMULATIONS)]
    held = sum(each.low <= 0.01 <= each.high for each in found)
    assert held >= SIMULATIONS * 0.9
    name, run, baseline, sizes, is_lower = losses(rng, 100, 0.05)
    apart = paired.compare(name, run[::-1], baseline, sizes, is_lower)
    assert (
        paired.compare(name, run, baseline, sizes, is_lower).verdict == "worse"
        and apart.verdict == "cannot tell"
    ), "by documents"


def test_verdicts_of_tasks_are_corrected_for_their_number() -> None:
    rng = np.random.default_rng(4)
    pair = answers(rng, 300)
    assert paired.compare(*pair, 8).detectable > paired.compare(*pair).detectable, (
        "more tests show less"
    )
    null = [[paired.compare(*answers(rng, 60), 8) for _ in range(8)] for _ in range(50)]
    assert sum(any(each.verdict == "better" for each in family) for family in null) <= 5


def test_rounding_is_no_difference() -> None:
    _, run, _, weights, _ = losses(np.random.default_rng(6), 100)
    assert paired.compare("loss", run * (1 - 1e-6), run, weights).verdict == "cannot tell"
    found = paired.compare("loss", run * (1 - 1e-3), run, weights)
    assert found.verdict == "better" and found.sentence.startswith("better with 100 samples: loss ")


def a(name: str, lower: bool, low: float, high: float, verdict: str) -> paired.Comparison:
    return paired.Comparison(name, 50, lower, 1.0, 1.0, (low + high) / 2, low, high, 0.1, verdict)


FOUND = [a("loss", True, -0.2, -0.1, "better"), a("fox/acc", False, -0.02, 0.03, "cannot tell")]


@pytest.mark.parametrize(
    "text, holds",
    [
        ("eval/loss better", True),
        ("loss not worse by 0", True),
        ("acc better", False),
        ("acc not worse by 0.03", True),
        ("fox/acc not worse by 0.01", False),
    ],
)
def test_a_requirement_holds_or_says_why_not(text: str, holds: bool) -> None:
    why = paired.failure(text, FOUND)
    assert why is None if holds else why is not None and text in why and "cannot tell" in why


@pytest.mark.parametrize(
    "text", ["loss", "loss is better", "loss not worse", "loss not worse by much", ""]
)
def test_another_syntax_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no requirement: write 'MEASURE better'"):
        paired.parse(text)


def test_a_measure_that_was_not_compared_is_refused() -> None:
    with pytest.raises(InputError, match="give one of loss, fox/acc"):
        paired.failure("exact_match better", FOUND)
    with pytest.raises(InputError, match="other tokens cannot be compared"):
        paired.failure("loss better", FOUND[1:])
