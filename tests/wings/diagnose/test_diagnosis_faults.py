"""A planted fault is diagnosed with the right cause first, and no healthy training is called wrong.

The histories are recorded (recorded.py). Marked slow: trainings with the change that was advised;
nightly: all trainings, diagnosed as they are.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_template.wings.diagnose import Finding, History, read_run
from tests.support.fault_runs import ALL, FAULTS, HEALTHY, Training, Trainings
from tests.support.histories import CASES, a_run, flat, incident
from tests.support.recorded import recorded
from tests.support.tiers import tiers
from tests.support.wings import as_text, engine

each_of = pytest.mark.parametrize
# The faults that are a key's, and cured in seconds. A fault in the code remains.
CURABLE = """learning_rate_x100 learning_rate_x0.001 router_collapse dead_expert
    router_collapse_by_weights expensive_checkpoints""".split()
DAILY = [fault for fault in FAULTS if fault.name == "learning_rate_x100"]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("faults"))


def is_named(training: Training, findings: list[Finding]) -> bool:
    """Whether the first finding is the expected one, with the expected cause first."""
    if not findings or findings[0].rule != training.rule or findings[0].level == "info":
        return False
    first = findings[0]
    cause = first.causes[0] if first.causes else None
    keys = [change.key for change in cause.changes] if cause else []
    text = " ".join([first.title, first.evidence, cause.sentence if cause else ""])
    return training.says in text and (keys[:1] == [training.key] if training.key else True)


def check(training: Training, findings: list[Finding]) -> None:
    text = as_text(findings) or "nothing was found"
    if training.rule:
        assert is_named(training, findings), text
    else:
        assert not [finding for finding in findings if finding.level == "error"], text


def ids(training: Training) -> str:
    return training.name


@each_of("training", ALL, ids=ids)
def test_a_recorded_training_is_diagnosed_as_expected(training: Training) -> None:
    check(training, engine.diagnose(recorded(training.name)))


@each_of("healthy", HEALTHY, ids=ids)
def test_a_healthy_training_meets_no_expectation_of_a_fault(healthy: Training) -> None:
    findings = engine.diagnose(recorded(healthy.name))
    assert not [fault.name for fault in FAULTS if is_named(fault, findings)], as_text(findings)


def test_every_rule_has_a_planted_fault() -> None:
    assert set(engine.RULES) == {fault.rule for fault in FAULTS}


@pytest.mark.slow
@each_of("training", tiers([each for each in FAULTS if each.name in CURABLE], daily=DAILY), ids=ids)
def test_the_advised_change_cures_the_fault(trainings: Trainings, training: Training) -> None:
    first = engine.diagnose(recorded(training.name))[0]
    advice = ["=".join(shlex.split(change.flag)) for change in first.causes[0].changes]
    cured = replace(training, name=f"{training.name}_cured", flags=[*training.flags, *advice])
    findings = engine.diagnose(read_run(trainings(cured)))
    assert trainings.records[cured.name].ok, trainings.records[cured.name].error
    rules = [finding.rule for finding in findings]
    assert training.rule not in rules, f"{advice}\n{as_text(findings)}"


@pytest.mark.slow
@pytest.mark.nightly
@each_of("training", ALL, ids=ids)
def test_a_live_training_is_diagnosed_as_expected(trainings: Trainings, training: Training) -> None:
    check(training, engine.diagnose(read_run(trainings(training))))


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
    frozen = found(a_run(columns=columns, facts={"parameters.trainable": 1000}))
    assert "frozen" in frozen["loss_not_decreasing"].causes[0].sentence
    bad = {"what": "output", "module": "model.layers.3.mlp", "ranks": [0]}
    first, rule = [incident(500, first_bad=bad)], "loss_not_finite"
    stable = found(a_run(incidents=first))[rule]
    assert "model.layers.3.mlp" in stable.causes[0].sentence and stable.ranks == [0]
    unstable = found(a_run(incidents=first, config={RATE: 0.5}))[rule]
    assert unstable.causes[0].changes[0].key == RATE
    repeated = [incident(step, rank=3, decision="skip") for step in (500, 900)]
    assert "rank 3" in found(a_run(incidents=repeated))[rule].causes[0].sentence
