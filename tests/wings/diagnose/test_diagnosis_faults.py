"""A planted fault is diagnosed with the right cause first, and no healthy training is called wrong.

The histories are recorded (recorded.py). Marked slow: trainings with the change that was advised;
nightly: all trainings, diagnosed as they are.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from dist_template.wings.diagnose import Finding, read_run
from tests.support.fault_runs import ALL, FAULTS, HEALTHY, Training, Trainings
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
    assert training.rule not in [finding.rule for finding in findings], (
        f"{advice}\n{as_text(findings)}"
    )


@pytest.mark.slow
@pytest.mark.nightly
@each_of("training", ALL, ids=ids)
def test_a_live_training_is_diagnosed_as_expected(trainings: Trainings, training: Training) -> None:
    check(training, engine.diagnose(read_run(trainings(training))))
