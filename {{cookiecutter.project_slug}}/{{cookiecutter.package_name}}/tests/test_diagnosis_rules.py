"""Every rule on a run that has its fault, and on the neighbouring one that has not. Nothing is trained here."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..diagnosis.engine import RULES, diagnose
from ..diagnosis.finding import Finding, as_text
from ..history.run import History
from .histories import EXPERTS, LAYERS, a_run, loss, noisy, rate

CPU = {"machine.device": "cpu", "machine.supports_bf16": False}
ONE = {"machine.world_size": 1}


def flat(value: float) -> Any:
    return lambda done: np.full_like(done, value)


def spiky(done: np.ndarray) -> np.ndarray:
    values = loss(done)
    values[[150, 250, 350]] *= 1.5
    return values


def incident(step: int, loss: float = math.nan, rank: int = 0, decision: str = "stop", **more: Any) -> dict[str, Any]:
    ranks = [{"rank": r, "loss": 2.0, "rows": [[r]]} for r in range(8)]
    return {
        "step": step,
        "kind": "non_finite",
        "decision": decision,
        "loss": loss,
        "suspects": [rank],
        "ranks": ranks,
    } | more


def lost(steps: int) -> dict[str, float]:
    return {"start": 60.0, "productive": 0.5 * steps, "checkpoint": 20.0, "lost": 0.2 * steps}


# rule -> (what is changed of a healthy run, and of its healthy neighbour)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss_not_finite": (
        {"incidents": [incident(500)]},
        {"incidents": [incident(500, loss=9.0, kind="spike", decision="skip")]},
    ),
    "loss_rises": (
        {"columns": {"train/loss": lambda done: loss(done) + 8 * np.maximum(done - 0.7, 0)}},
        {"columns": {"train/loss": lambda done: loss(done) + 0.3 * np.maximum(done - 0.7, 0)}},
    ),
    "loss_jumped_at_the_start": (
        {"columns": {"train/loss": lambda done: loss(done) + 9 * ((done > 0.0025) & (done < 0.02))}, "every": 5},
        {"columns": {"train/loss": lambda done: loss(done) + 0.5 * ((done > 0.0025) & (done < 0.02))}, "every": 5},
    ),
    "loss_spikes": (
        {"columns": {"train/loss": spiky}},
        {"columns": {"train/loss": lambda done: noisy(loss(done), 0.03)}},
    ),
    "loss_oscillates": (
        {"columns": {"train/loss": lambda done: noisy(loss(done), 0.3)}},
        {"columns": {"train/loss": lambda done: noisy(loss(done), 0.05)}},
    ),
    "loss_stands_still": (
        {"columns": {"train/loss": lambda done: noisy(np.full_like(done, 10.82), 0.002)}},
        {"columns": {"train/loss": lambda done: noisy(np.full_like(done, 3.0), 0.002)}},  # fine-tuned: it was good
    ),
    "loss_starts_too_high": (
        {"columns": {"train/loss": lambda done: loss(done) * 2}},
        {"columns": {"train/loss": lambda done: loss(done) * 1.05}},
    ),
    "loss_knows_frequencies": (  # 2.5 bits a byte of 4.5 bytes: 7.8 nats
        {"columns": {"train/loss": lambda done: noisy(7.8 + 3 * np.exp(-done / 0.05))}},
        {"columns": {"train/loss": lambda done: noisy(6.8 + 4 * np.exp(-done / 0.05))}},
    ),
    "loss_too_good": (
        {"columns": {"eval/bits_per_byte": flat(0.05)}},
        {"columns": {"eval/bits_per_byte": flat(0.6)}},
    ),
    "gradient_is_zero": ({"columns": {"train/grad_norm": flat(0.0)}}, {"columns": {"train/grad_norm": flat(1e-3)}}),
    "gradient_norm_drifts": (
        {"columns": {"train/grad_norm": lambda done: noisy(0.2 * np.exp(3 * done), 0.1)}},
        {"columns": {"train/grad_norm": lambda done: noisy(0.3 + 0.3 * done, 0.1)}},
    ),
    "gradient_explodes": (
        {"columns": {"train/grad_norm": lambda done: noisy(np.where(np.isclose(done, 0.5), 300.0, 0.5), 0.1)}},
        {"columns": {"train/grad_norm": lambda done: noisy(np.where(np.isclose(done, 0.5), 3.0, 0.5), 0.1)}},
    ),
    "clips_most_steps": (
        {"columns": {"health/clipped_share": flat(0.9)}},
        {"columns": {"health/clipped_share": flat(0.3)}},
    ),
    "rate_above_peak": (
        {"columns": {"train/learning_rate": lambda done: rate(done) * np.where(done > 0.1, 2.5, 1)}},
        {"config": {"model.optim.learning_rate": 6e-4}},
    ),
    "labels_masked": ({"columns": {"data/counted_share": flat(0.0)}}, {"columns": {"data/counted_share": flat(0.2)}}),
    "labels_not_shifted": ({"facts": {"data.unshifted_share": 1.0}}, {"facts": {"data.unshifted_share": 0.2}}),
    "data_is_constant": (
        {"facts": {"data.distinct_tokens": 2}, "columns": {"data/distinct_token_share": flat(2 / 16384)}},
        {"facts": {"data.distinct_tokens": 26}},
    ),
    "duplicates_across_splits": ({"facts": {"data.duplicate_share": 0.1}}, {"facts": {"data.duplicate_share": 0.005}}),
    "padding": ({"facts": {"data.pad_share": 0.5}}, {"facts": {"data.pad_share": 0.05}}),
    "chat_template_missing": (
        {"facts": {"data.chat_share": 0.0}, "config": {"model.pretrained": "some/model"}},
        {"facts": {"data.chat_share": 0.9}, "config": {"model.pretrained": "some/model"}},
    ),
    "seen_too_often": ({"facts": {"data.train_tokens": 10_000_000}}, {"facts": {"data.train_tokens": 200_000_000}}),
    "overfits": (
        {"columns": {"eval/loss": lambda done: 3.05 + 7.8 * np.exp(-done / 0.05) + np.maximum(done - 0.4, 0)}},
        {"columns": {"eval/loss": lambda done: 3.05 + 7.8 * np.exp(-done / 0.05) + 0.03 * np.maximum(done - 0.4, 0)}},
    ),
    "validation_too_small": ({"facts": {"data.validation_tokens": 900}}, {"facts": {"data.validation_tokens": 20_000}}),
    "validates_too_rarely": (
        {"config": {"trainer.val_check_interval": 20_000}},
        {"config": {"trainer.val_check_interval": 2000}},
    ),
    "validation_too_dear": (
        {"goodput": {"productive": 5000.0, "validation": 4000.0}},
        {"goodput": {"productive": 5000.0, "validation": 400.0}},
    ),
    "experts_unused": (
        {"columns": {"moe/unused_experts": flat(0.6 * LAYERS * EXPERTS)}},
        {"columns": {"moe/unused_experts": flat(3.0)}},
    ),
    "experts_overloaded": (
        {"columns": {"moe/expert_load_max_over_mean": flat(7.0)}},
        {"columns": {"moe/expert_load_max_over_mean": flat(2.5)}},
    ),
    "memory_nearly_full": (
        {"columns": {"memory/peak_share": flat(0.97)}},
        {"columns": {"memory/peak_share": flat(0.94)}},
    ),
    "memory_grows": (
        {"columns": {"memory/allocated_gib": lambda done: noisy(40 + 20 * done, 0.001)}},
        {"columns": {"memory/allocated_gib": lambda done: noisy(40 + 10 * (done > 0.01), 0.001)}},
    ),
    "waits_for_data": (
        {"columns": {"perf/data_wait_share": flat(0.4)}},
        {
            "columns": {"perf/data_wait_share": lambda done: np.where(done * 10 % 1 < 0.01, 0.6, 0.02)}
        },  # after validation
    ),
    "slow_rank": (
        {"columns": {"rank/slowest": flat(5.0), "rank/slowest_over_median": flat(1.8)}},
        {"columns": {"rank/slowest_over_median": flat(1.8)}},  # another one each time
    ),
    "waits_for_others": (
        {"columns": {"rank/slowest_step_s": flat(0.05)}},
        {"columns": {"rank/slowest_step_s": flat(0.05)}, "facts": {"training.strategy": "MeshStrategy"}},
    ),
    "gets_slower": (
        {"columns": {"perf/step_s": lambda done: noisy(0.5 + 0.5 * done, 0.02)}},
        {"columns": {"perf/step_s": lambda done: noisy(0.5 + 0.1 * done, 0.02)}},
    ),
    "tiny_micro_batch": (
        {
            "config": {"data.micro_batch_size": 1},
            "columns": {"memory/peak_share": flat(0.1)},
            "facts": {"data.accumulation": 32},
        },
        {
            "config": {"data.micro_batch_size": 1},
            "columns": {"memory/peak_share": flat(0.7)},
            "facts": {"data.accumulation": 32},
        },
    ),
    "fp32_on_bf16": (
        {"config": {"trainer.precision": "32-true"}},
        {"config": {"trainer.precision": "32-true"}, "facts": CPU},
    ),
    "eager_attention": ({"facts": {"model.attention": "eager"}}, {"facts": {"model.attention": "sdpa"}}),
    "not_compiled": (
        {"columns": {"perf/mfu": flat(0.2)}},
        {"columns": {"perf/mfu": flat(0.2)}, "facts": {"training.compiled": True}},
    ),
    "clocks_held_down": ({"columns": {"gpu/throttled": flat(0.5)}}, {"columns": {"gpu/throttled": flat(0.0)}}),
    "checkpoint_too_dear": (
        {"config": {"last_checkpoint.every_n_steps": 10}, "goodput": {"productive": 5000.0, "checkpoint": 2000.0}},
        {"goodput": {"productive": 5000.0, "checkpoint": 20.0}},
    ),
    "checkpoint_too_rare": (
        {
            "config": {"last_checkpoint.every_n_steps": 9000},
            "goodput": lost(10_000),
            "columns": {"perf/checkpoint_s": flat(2.0)},
        },
        {"goodput": {"productive": 5000.0, "checkpoint": 20.0}},
    ),
    "ends_too_late": (
        {"upto": 0.3, "config": {"preemption.max_time": "00:01:00:00"}},
        {"upto": 0.3, "config": {"preemption.max_time": "00:02:00:00"}},
    ),
}


def told(history: History) -> dict[str, Finding]:
    return {finding.rule: finding for finding in diagnose(history)}


def test_every_rule_has_a_case() -> None:
    diagnose(a_run(100))
    other_files = {name for name, rule in RULES.items() if rule.__module__.endswith((".crashes", ".memory_full"))}
    assert set(RULES) - other_files - {"checkpoint_interval"} == set(CASES) - {
        "checkpoint_too_dear",
        "checkpoint_too_rare",
    }


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_tells_its_fault_and_not_its_neighbour(rule: str, tmp_path: Path) -> None:
    (tmp_path / "config.0.yaml").touch()  # of an earlier attempt
    faulty, neighbour = (a_run(**change, folder=tmp_path) for change in CASES[rule])
    found = told(faulty)
    assert rule in found, f"silent; told were {sorted(found)}"
    assert rule not in told(neighbour)
    finding = found[rule]
    assert finding.evidence and finding.causes
    assert any(letter.isdigit() for letter in finding.evidence), "evidence has values"
    for cause in finding.causes:
        for change in cause.changes:
            assert change.to is not None and change.to != change.now, change


@pytest.mark.parametrize(("steps", "every"), [(20, 1), (100, 10), (10_000, 25), (100_000, 50)])
def test_of_a_healthy_run_nothing_is_told(steps: int, every: int) -> None:
    assert [f.line for f in diagnose(a_run(steps, every))] == []


@pytest.mark.parametrize("upto", [0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9])
def test_nor_at_any_time_while_it_goes_on(upto: float) -> None:
    assert [f.line for f in diagnose(a_run(100_000, 10, upto=upto))] == []


def test_a_run_that_has_written_nothing_has_no_findings(tmp_path: Path) -> None:
    assert diagnose(History(tmp_path)) == []


def test_all_rules_together_take_less_than_20_ms_over_2000_points() -> None:
    history = a_run(100_000, 50)
    assert len(history.metrics["train/loss"]) == 2000
    diagnose(history)  # imports
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        diagnose(history)
        spent.append(time.perf_counter() - began)
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
