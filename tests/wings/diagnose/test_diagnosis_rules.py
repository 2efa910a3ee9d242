"""Each rule finds its fault in a synthetic history and not in a near miss; healthy runs have no findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_template.wings.diagnose import Finding, History
from tests.support.histories import CASES, Column, a_run, noisy
from tests.support.wings import engine

NEEDS_A_CRASH = {"out_of_memory", "crashed"}  # tests/callbacks/test_crashes.py


def found(history: History) -> dict[str, Finding]:
    return {finding.rule: finding for finding in engine.diagnose(history)}


def test_every_rule_has_a_case() -> None:
    assert set(engine.RULES) - NEEDS_A_CRASH == set(CASES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_finds_its_fault_and_not_the_near_miss(rule: str) -> None:
    faulty, near_miss = (a_run(**changes) for changes in CASES[rule])
    findings = found(faulty)
    assert rule in findings, f"found: {sorted(findings)}"
    assert rule not in found(near_miss)
    finding = findings[rule]
    assert finding.evidence and finding.causes
    assert any(letter.isdigit() for letter in finding.evidence), "evidence has values"
    for cause in finding.causes:
        for change in cause.changes:
            assert change.to is not None and change.to != change.now, change


@pytest.mark.parametrize(("steps", "every"), [(20, 1), (100, 10), (10_000, 25), (100_000, 50)])
def test_a_healthy_run_has_no_findings(steps: int, every: int) -> None:
    assert [f.line for f in engine.diagnose(a_run(steps, every))] == []


@pytest.mark.parametrize("upto", [0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9])
def test_a_healthy_run_has_no_findings_at_any_time(upto: float) -> None:
    assert [f.line for f in engine.diagnose(a_run(100_000, 10, upto=upto))] == []


@pytest.mark.parametrize("upto", [0.27, 0.9, 1.0])
def test_a_load_of_experts_that_still_falls_is_reported_at_the_end(upto: float) -> None:
    load: dict[str, Column | None] = {
        "moe/expert_load_max_over_mean": lambda done: noisy(3.9 - 0.8 * done, 0.02)
    }  # 2.8 is the limit
    run = a_run(300, 10, upto=upto, columns=load, config={"model.balance.bias_update_speed": 0.003})
    findings = found(run)
    assert ("experts_overloaded" in findings) == (upto == 1)
    if upto == 1:
        (change,) = findings["experts_overloaded"].causes[0].changes
        assert (change.now, change.to) == (0.003, 0.006), (
            "300 steps ask for 1/300, which is rounded to 0.003"
        )


def test_a_run_that_has_written_nothing_has_no_findings(tmp_path: Path) -> None:
    assert engine.diagnose(History(tmp_path)) == []
