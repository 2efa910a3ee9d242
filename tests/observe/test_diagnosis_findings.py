"""What is made of the rules' findings: in which order, how fast, which values are proposed, how it reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_template.observe.diagnosis.engine import RULES, diagnose
from dist_template.observe.diagnosis.finding import as_text
from dist_template.observe.history.run import History
from tests.observe.test_diagnosis_rules import CASES, flat, incident, told
from tests.support.histories import a_run, loss, rate


def test_all_rules_together_take_less_than_20_ms_over_2000_points() -> None:
    history = a_run(100_000, 50)
    assert len(history.metrics["train/loss"]) == 2000
    diagnose(history)  # imports
    spent = []
    for _ in range(5):
        began = time.process_time()
        diagnose(history)
        spent.append(time.process_time() - began)
    assert min(spent) < 0.020


def test_a_rule_that_raises_is_told_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(history: History) -> Any:
        raise KeyError("train/lsos")
        yield

    diagnose(a_run(20, 1))
    monkeypatch.setitem(RULES, "broken", broken)
    (finding,) = diagnose(a_run(20, 1))
    assert finding.level == "info" and "KeyError" in finding.evidence


def test_the_worst_comes_first_then_the_surest_and_consequences_are_left_out() -> None:
    change: dict[str, Any] = {"columns": {"data/counted_share": flat(0.0), "train/grad_norm": flat(0.0)}}
    change["columns"] |= {"perf/data_wait_share": flat(0.4), "rank/slowest_step_s": flat(0.3)}
    findings = diagnose(a_run(**change, facts={"model.attention": "eager"}))
    assert [finding.rule for finding in findings] == ["labels_masked", "waits_for_data", "eager_attention"]
    assert [finding.weight for finding in findings] == sorted(finding.weight for finding in findings)


def test_the_validation_before_training_is_none_to_stop_at() -> None:
    """Published weights may be best before they are trained on too little; no checkpoint is kept of that step."""
    history = a_run(columns={"eval/loss": lambda done: 2.0 + done})
    assert proposed(history, "overfits", "trainer.max_steps") == 1000


@pytest.mark.parametrize(
    ("tokenizer", "advised"),
    [
        ({"class_path": "x.Pretrained", "init_args": {"path": "weights/"}}, []),
        ({"class_path": "x.Pretrained", "init_args": {"path": "other"}}, ["--data.tokenizer.path weights"]),
        ({"class_path": "x.ByteBPE"}, ["--data.tokenizer Pretrained", "--data.tokenizer.path weights"]),
    ],
)
def test_the_tokenizer_of_the_weights_is_advised_unless_it_is_in_use(tokenizer: Any, advised: list[str]) -> None:
    config = {"model.pretrained": "weights", "data.tokenizer": tokenizer}
    history = a_run(columns={"train/loss": lambda done: loss(done) * 2}, config=config)
    cause = told(history)["loss_starts_too_high"].causes[0]
    assert "tokenizer" in cause.sentence and [change.flag for change in cause.changes] == advised


# ---- the values that are proposed ----------------------------------------------------------------------------------


def proposed(history: History, rule: str, key: str) -> Any:
    return next(c.to for cause in told(history)[rule].causes for c in cause.changes if c.key == key)


def test_a_rate_that_broke_on_its_way_up_is_halved_from_where_it_broke() -> None:
    def broken(done: np.ndarray) -> np.ndarray:
        return np.where(done < 0.02, 10.8 - 100 * done, 8.8 + 40 * (done - 0.02))

    history = a_run(1000, 2, upto=0.1, columns={"train/loss": broken})
    # 6e-4 is reached at 0.05 of the training; at 0.02 it was 2.4e-4
    assert proposed(history, "loss_rises", "model.optim.learning_rate") == pytest.approx(1.2e-4, rel=0.3)


def test_the_checkpoint_interval_is_youngs(tmp_path: Path) -> None:
    (tmp_path / "config.0.yaml").touch()
    history = a_run(**CASES["checkpoint_too_rare"][0], folder=tmp_path)
    # one failure in 7,020 s, a save of 2 s: sqrt(2 x 2 x 7020) = 168 s, of 0.5 s a step
    assert proposed(history, "checkpoint_too_rare", "last_checkpoint.every_n_steps") == pytest.approx(336, rel=0.2)


def test_the_micro_batch_grows_as_far_as_memory_and_accumulation_let_it() -> None:
    history = a_run(**CASES["tiny_micro_batch"][0])  # at 0.1 of the memory, to 0.6 at most: 6 times, and 4 divides 32
    assert proposed(history, "tiny_micro_batch", "data.micro_batch_size") == 4


def test_what_is_sent_depends_on_the_strategy() -> None:
    busy = {"gpu/utilization": flat(0.99), "perf/mfu": flat(0.08)}
    mesh = {"trainer.strategy": {"class_path": "MeshStrategy", "init_args": {"tp_size": 8, "dp_replicate_size": 1}}}
    facts = {"training.strategy": "MeshStrategy", "training.compiled": True}
    assert proposed(a_run(columns=busy, config=mesh, facts=facts), "waits_for_others", "trainer.strategy.tp_size") == 4
    zero = {"trainer.strategy": {"class_path": "ZeroStrategy", "init_args": {"stage": 3}}}
    facts = {"training.strategy": "ZeroStrategy", "training.compiled": True}
    columns = busy | {"memory/peak_share": flat(0.3)}
    assert proposed(a_run(columns=columns, config=zero, facts=facts), "waits_for_others", "trainer.strategy.stage") == 2
    slow = a_run(columns=busy, config=mesh | {"trainer.precision": "32-true"}, facts=facts)
    assert "waits_for_others" not in told(slow) and "fp32_on_bf16" in told(slow)


def test_the_slow_rank_is_told_with_its_host() -> None:
    finding = told(a_run(**CASES["slow_rank"][0]))["slow_rank"]
    assert finding.ranks == [5] and "node2" in finding.title


def test_slurms_end_is_a_limit_too_and_the_value_proposed_would_do() -> None:
    slurm = a_run(upto=0.3, environment={"job_ends": 3000.0})
    assert "around step 5880" in told(slurm)["ends_too_late"].evidence  # 0.5 s a step, from second 60 on
    given = a_run(upto=0.3, config={"preemption.max_time": "00:01:00:00"})
    longer = proposed(given, "ends_too_late", "preemption.max_time")
    assert not told(a_run(upto=0.3, config={"preemption.max_time": longer}))


def test_frozen_parameters_come_before_the_learning_rate() -> None:
    still = {"train/loss": flat(10.8)}
    frozen = told(a_run(columns=still, facts={"parameters.trainable": 1000}))["loss_stands_still"]
    assert "frozen" in frozen.causes[0].sentence
    low = {"train/learning_rate": lambda done: rate(done) * 1e-6}
    slow = told(a_run(columns=still | low, config={"model.optim.learning_rate": 6e-10}))["loss_stands_still"]
    assert slow.causes[0].changes[0].key == "model.optim.learning_rate" and slow.causes[0].changes[0].to > 1e-5


def test_where_nan_begins_comes_first_unless_training_was_going_wrong() -> None:
    bad = incident(500, first_bad={"what": "output", "module": "model.layers.3.mlp", "ranks": [0]})
    sound = told(a_run(incidents=[bad]))["loss_not_finite"]
    assert "model.layers.3.mlp" in sound.causes[0].sentence and sound.level == "error" and sound.ranks == [0]
    hot = told(a_run(incidents=[bad], config={"model.optim.learning_rate": 0.5}))["loss_not_finite"]
    assert hot.causes[0].changes[0].key == "model.optim.learning_rate"
    again = [incident(step, rank=3, decision="skip") for step in (500, 900)]
    assert "rank 3" in told(a_run(incidents=again))["loss_not_finite"].causes[0].sentence


# ---- how it reads --------------------------------------------------------------------------------------------------


def test_text_fits_a_screen_and_has_flags_to_type() -> None:
    change = {name: column for case in CASES.values() for name, column in case[0].get("columns", {}).items()}
    findings = diagnose(a_run(columns=change, config={"trainer.precision": "32-true"}))
    assert len(findings) > 8
    text = as_text(findings)
    assert len(text.splitlines()) < 60 and max(map(len, text.splitlines())) <= 130
    assert text.startswith(findings[0].level.upper()) and "--" in text
    assert all(finding.title in text for finding in findings)
    assert len(as_text(findings, everything=True)) > len(text)
    markdown = as_text([told(a_run(**CASES["fp32_on_bf16"][0]))["fp32_on_bf16"]], markdown=True)
    assert markdown.startswith("- **warning: ") and "`--trainer.precision bf16-mixed` (now 32-true)" in markdown
