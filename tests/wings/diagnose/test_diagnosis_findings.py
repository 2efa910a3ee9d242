"""Findings: their order, the values that they propose, the time that they take, and their text."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from dist_template.wings.diagnose import Finding, History
from tests.support.histories import CASES, a_run, flat, incident, rate
from tests.support.wings import as_text, engine


def finding(rule: str, **changes: Any) -> Finding:
    """The finding of `rule` in a healthy run with these changes."""
    (found,) = (each for each in engine.diagnose(a_run(**changes)) if each.rule == rule)
    return found


def proposed(key: str, rule: str, **changes: Any) -> Any:
    causes = finding(rule, **changes).causes
    return next(change.to for cause in causes for change in cause.changes if change.key == key)


def test_all_rules_together_take_milliseconds_over_2000_points() -> None:
    history = a_run(100_000, 50)
    assert len(history.metrics["train/loss"]) == 2000
    spent = []
    for _ in range(5):
        start = time.process_time()
        engine.diagnose(history)
        spent.append(time.process_time() - start)
    assert (
        min(spent) < 0.2
    )  # below 0.02 on an idle machine; a rule that is quadratic in the points takes seconds


def test_a_rule_that_raises_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(history: History) -> Any:
        raise KeyError("train/lsos")
        yield

    monkeypatch.setitem(engine.RULES, "broken", broken)
    (found,) = engine.diagnose(a_run(20, 1))
    assert found.level == "info" and "KeyError" in found.evidence


def test_findings_are_sorted_and_consequences_are_dropped() -> None:
    columns: dict[str, Any] = {"train/loss": flat(0.0)}
    columns["perf/data_wait_share"] = flat(0.2)
    findings = engine.diagnose(a_run(columns=columns, config={"trainer.precision": "32-true"}))
    assert [each.rule for each in findings] == ["labels_masked", "fp32_on_gpu", "waits_for_data"]
    assert [each.weight for each in findings] == [(0, 0), (1, 0), (1, 1)]


# ---- proposed values -------------------------------------------------------------------------------------------------


def test_a_rate_that_was_unstable_during_warm_up_is_halved_from_there() -> None:
    def unstable(done: np.ndarray) -> np.ndarray:
        return np.where(done < 0.02, 10.8 - 100 * done, 8.8 + 40 * (done - 0.02))

    run: dict[str, Any] = {
        "steps": 1000,
        "every": 2,
        "upto": 0.1,
        "columns": {"train/loss": unstable},
    }
    # 6e-4 is reached at 0.05 of the training; at 0.02 it was 2.4e-4
    assert proposed("model.optim.learning_rate", "loss_diverges", **run) == pytest.approx(
        1.2e-4, rel=0.3
    )


def test_the_proposed_interval_leaves_five_percent_for_checkpoints() -> None:
    faulty = CASES["checkpoint_overhead_high"][0]
    to = proposed("last_checkpoint.every_n_steps", "checkpoint_overhead_high", **faulty)
    assert to == 80  # 1,000 checkpoints of 2 s, a step of 0.5 s


def test_the_slow_rank_is_reported_with_its_host() -> None:
    found = finding("slow_rank", **CASES["slow_rank"][0])
    assert found.ranks == [5] and "node2" in found.title


def test_frozen_parameters_come_before_the_learning_rate() -> None:
    constant = {"train/loss": flat(10.8)}
    frozen = finding("loss_not_decreasing", columns=constant, facts={"parameters.trainable": 1000})
    assert "frozen" in frozen.causes[0].sentence
    columns = constant | {"train/learning_rate": lambda done: rate(done) * 1e-6}
    low = finding(
        "loss_not_decreasing", columns=columns, config={"model.optim.learning_rate": 6e-10}
    )
    (change,) = low.causes[0].changes
    to: Any = change.to
    assert change.key == "model.optim.learning_rate" and to > 1e-5


def test_the_module_that_is_first_not_finite_comes_first_in_a_stable_training() -> None:
    first = incident(
        500, first_bad={"what": "output", "module": "model.layers.3.mlp", "ranks": [0]}
    )
    stable = finding("loss_not_finite", incidents=[first])
    assert (
        "model.layers.3.mlp" in stable.causes[0].sentence
        and stable.level == "error"
        and stable.ranks == [0]
    )
    unstable = finding(
        "loss_not_finite", incidents=[first], config={"model.optim.learning_rate": 0.5}
    )
    assert unstable.causes[0].changes[0].key == "model.optim.learning_rate"
    repeated = [incident(step, rank=3, decision="skip") for step in (500, 900)]
    assert "rank 3" in finding("loss_not_finite", incidents=repeated).causes[0].sentence


# ---- text ------------------------------------------------------------------------------------------------------------


def test_text_fits_a_screen_and_has_flags_to_type() -> None:
    columns = {
        name: column
        for case in CASES.values()
        for name, column in case[0].get("columns", {}).items()
    }
    findings = engine.diagnose(a_run(columns=columns, config={"trainer.precision": "32-true"}))
    assert len(findings) > 4
    text = as_text(findings)
    assert max(map(len, text.splitlines())) <= 130
    assert text.startswith(findings[0].level.upper()) and "--" in text
    assert all(each.title in text for each in findings)
