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
    assert min(spent) < 0.2  # below 0.02 on an idle machine; a rule that is quadratic in the points takes seconds


def test_a_rule_that_raises_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(history: History) -> Any:
        raise KeyError("train/lsos")
        yield

    monkeypatch.setitem(engine.RULES, "broken", broken)
    (found,) = engine.diagnose(a_run(20, 1))
    assert found.level == "info" and "KeyError" in found.evidence


def test_findings_are_sorted_and_consequences_are_dropped() -> None:
    columns: dict[str, Any] = {"data/counted_share": flat(0.0), "train/grad_norm": flat(0.0)}
    columns |= {"memory/peak_share": flat(0.97), "perf/data_wait_share": flat(0.2)}
    findings = engine.diagnose(a_run(columns=columns))
    assert [each.rule for each in findings] == ["labels_masked", "memory_nearly_full", "waits_for_data"]
    assert [each.weight for each in findings] == [(0, 0), (1, 0), (1, 1)]


def test_the_validation_before_training_is_not_proposed_as_the_last_step() -> None:
    """Pretrained weights may be best before training on too little text; no checkpoint is kept of that step."""
    columns = {"eval/loss": lambda done: 2.0 + done}
    assert proposed("trainer.max_steps", "overfits", columns=columns) == 1000


# ---- proposed values -------------------------------------------------------------------------------------------------


def test_a_rate_that_was_unstable_during_warm_up_is_halved_from_there() -> None:
    def unstable(done: np.ndarray) -> np.ndarray:
        return np.where(done < 0.02, 10.8 - 100 * done, 8.8 + 40 * (done - 0.02))

    run: dict[str, Any] = {"steps": 1000, "every": 2, "upto": 0.1, "columns": {"train/loss": unstable}}
    # 6e-4 is reached at 0.05 of the training; at 0.02 it was 2.4e-4
    assert proposed("model.optim.learning_rate", "loss_diverges", **run) == pytest.approx(1.2e-4, rel=0.3)


def test_the_proposed_interval_leaves_five_percent_for_checkpoints() -> None:
    faulty = CASES["checkpoint_overhead_high"][0]
    to = proposed("last_checkpoint.every_n_steps", "checkpoint_overhead_high", **faulty)
    assert to == 80  # 1,000 checkpoints of 2 s, a step of 0.5 s


def test_the_slow_rank_is_reported_with_its_host() -> None:
    found = finding("slow_rank", **CASES["slow_rank"][0])
    assert found.ranks == [5] and "node2" in found.title


def test_the_remedies_of_a_pipeline_are_computed_from_the_run() -> None:
    waits = CASES["pipeline_waits"][0]
    assert proposed("data.micro_batch_size", "pipeline_waits", **waits) == 2  # 32 micro-batches: 18 %
    assert proposed("trainer.strategy.init_args.pp_schedule", "pipeline_waits", **waits) == "Interleaved1F1B"
    uneven = CASES["uneven_stages"][0]
    assert "stage 1" in finding("uneven_stages", **uneven).title


def test_slurms_limit_counts_and_the_proposed_limit_is_long_enough() -> None:
    slurm = finding("time_limit_too_short", upto=0.3, environment={"job_ends": 3000.0})
    assert "around step 5880" in slurm.evidence  # 0.5 s a step, from second 60 on
    short = {"upto": 0.3, "config": {"preemption.max_time": "00:01:00:00"}}
    longer = proposed("preemption.max_time", "time_limit_too_short", **short)
    assert not engine.diagnose(a_run(upto=0.3, config={"preemption.max_time": longer}))


def test_frozen_parameters_come_before_the_learning_rate() -> None:
    constant = {"train/loss": flat(10.8)}
    frozen = finding("loss_not_decreasing", columns=constant, facts={"parameters.trainable": 1000})
    assert "frozen" in frozen.causes[0].sentence
    columns = constant | {"train/learning_rate": lambda done: rate(done) * 1e-6}
    low = finding("loss_not_decreasing", columns=columns, config={"model.optim.learning_rate": 6e-10})
    (change,) = low.causes[0].changes
    to: Any = change.to
    assert change.key == "model.optim.learning_rate" and to > 1e-5


def test_the_module_that_is_first_not_finite_comes_first_in_a_stable_training() -> None:
    first = incident(500, first_bad={"what": "output", "module": "model.layers.3.mlp", "ranks": [0]})
    stable = finding("loss_not_finite", incidents=[first])
    assert "model.layers.3.mlp" in stable.causes[0].sentence and stable.level == "error" and stable.ranks == [0]
    unstable = finding("loss_not_finite", incidents=[first], config={"model.optim.learning_rate": 0.5})
    assert unstable.causes[0].changes[0].key == "model.optim.learning_rate"
    repeated = [incident(step, rank=3, decision="skip") for step in (500, 900)]
    assert "rank 3" in finding("loss_not_finite", incidents=repeated).causes[0].sentence


# ---- text ------------------------------------------------------------------------------------------------------------


def test_text_fits_a_screen_and_has_flags_to_type() -> None:
    columns = {name: column for case in CASES.values() for name, column in case[0].get("columns", {}).items()}
    findings = engine.diagnose(a_run(columns=columns, config={"trainer.precision": "32-true"}))
    assert len(findings) > 6
    text = as_text(findings, num=4)
    assert len(text.splitlines()) < 60 and max(map(len, text.splitlines())) <= 130
    assert text.startswith(findings[0].level.upper()) and "--" in text
    assert all(each.title in text for each in findings)
    assert len(as_text(findings)) > len(text)


@pytest.mark.parametrize("last", [9.0, 16.0])
def test_a_validation_that_is_worse_than_before_training_shows_overfitting(last: float) -> None:
    """A short training has only two validations: before it, and at its end."""
    run = a_run(100, 1, columns={"eval/loss": None})
    run.metrics.add({"step": 0, "time": 0.0, "eval/loss": 10.8})
    run.metrics.add({"step": 100, "time": 100.0, "eval/loss": last})
    found = {each.rule: each for each in engine.diagnose(run)}
    assert ("overfits" in found) == (last > 10.8)
    if last > 10.8:
        assert "eval/loss was 10.8 at step 0 and is 16 at step 100" in found["overfits"].evidence
        assert all(change.key != "trainer.max_steps" for cause in found["overfits"].causes for change in cause.changes)
