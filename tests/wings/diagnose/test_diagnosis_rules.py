"""Each rule finds its fault in a synthetic history and not in a near miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_template.wings.diagnose import Finding, History
from tests.support.histories import CASES, a_run, flat, incident, rate
from tests.support.wings import as_text, engine

NEEDS_A_CRASH = {"out_of_memory", "crashed"}  # tests/callbacks/test_crashes.py
RATE, LOSS = "model.optim.learning_rate", "train/loss"


def found(history: History) -> dict[str, Finding]:
    return {finding.rule: finding for finding in engine.diagnose(history)}


@pytest.mark.parametrize("rule", sorted(set(engine.RULES) - NEEDS_A_CRASH))
def test_a_rule_finds_its_fault_and_not_the_near_miss(rule: str) -> None:
    faulty, near_miss = (found(a_run(**changes)) for changes in CASES[rule])
    assert rule in faulty, f"found: {sorted(faulty)}"
    assert rule not in near_miss
    finding = faulty[rule]
    assert finding.causes and any(letter.isdigit() for letter in finding.evidence)
    for change in (change for cause in finding.causes for change in cause.changes):
        assert change.to is not None and change.to != change.now, change


HEALTHY = [(20, 1, 1.0), (100, 10, 1.0), (10_000, 25, 1.0), (100_000, 50, 1.0)]
HEALTHY += [(100_000, 10, upto) for upto in (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9)]


@pytest.mark.parametrize(("steps", "every", "upto"), HEALTHY)
def test_a_healthy_run_has_no_findings(steps: int, every: int, upto: float, tmp_path: Path) -> None:
    assert [f.line for f in engine.diagnose(a_run(steps, every, upto=upto))] == []
    assert engine.diagnose(History(tmp_path)) == [], "nor one that has written nothing"


def test_a_rule_that_raises_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(history: History) -> Any:
        raise KeyError("train/lsos")
        yield

    monkeypatch.setitem(engine.RULES, "broken", broken)
    (finding,) = engine.diagnose(a_run(20, 1))
    assert finding.level == "info" and "KeyError" in finding.evidence


def test_findings_are_sorted_and_consequences_are_dropped() -> None:
    columns: dict[str, Any] = {LOSS: flat(0.0), "perf/data_wait_share": flat(0.2)}
    findings = engine.diagnose(a_run(columns=columns, config={"trainer.precision": "32-true"}))
    rules = [each.rule for each in findings]
    assert rules == ["labels_masked", "fp32_on_gpu", "waits_for_data"]
    text = as_text(findings)
    assert max(map(len, text.splitlines())) <= 130
    assert text.startswith(findings[0].level.upper()) and "--" in text
    assert all(each.title in text for each in findings)


def test_proposed_values() -> None:
    rule = "checkpoint_overhead_high"
    causes = found(a_run(**CASES[rule][0]))[rule].causes
    changes = {c.key: c.to for cause in causes for c in cause.changes}
    assert changes["last_checkpoint.every_n_steps"] == 80  # 1,000 saves of 2 s, a step of 0.5 s
    slow = found(a_run(**CASES["slow_rank"][0]))["slow_rank"]
    assert slow.ranks == [5] and "node2" in slow.title


def test_the_likelier_cause_comes_first() -> None:
    columns: Any = {LOSS: flat(10.8)}
    facts: Any = {"parameters.trainable": 1000}
    frozen = found(a_run(columns=columns, facts=facts))["loss_not_decreasing"]
    assert "frozen" in frozen.causes[0].sentence
    columns["train/learning_rate"] = lambda done: rate(done) * 1e-6
    low = found(a_run(columns=columns, config={RATE: 6e-10}))["loss_not_decreasing"]
    (change,) = low.causes[0].changes
    to: Any = change.to
    assert change.key == RATE and to > 1e-5

    bad = {"what": "output", "module": "model.layers.3.mlp", "ranks": [0]}
    first, rule = [incident(500, first_bad=bad)], "loss_not_finite"
    stable = found(a_run(incidents=first))[rule]
    assert "model.layers.3.mlp" in stable.causes[0].sentence and stable.ranks == [0]
    unstable = found(a_run(incidents=first, config={RATE: 0.5}))[rule]
    assert unstable.causes[0].changes[0].key == RATE
    repeated = [incident(step, rank=3, decision="skip") for step in (500, 900)]
    assert "rank 3" in found(a_run(incidents=repeated))[rule].causes[0].sentence
