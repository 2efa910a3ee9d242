"""Every rule on a run that has its fault, and on the neighbouring one that has not. Nothing is trained here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_template.observe.diagnosis.engine import RULES, diagnose
from dist_template.observe.diagnosis.finding import Finding
from dist_template.observe.history.run import History
from tests.support.histories import EXPERTS, LAYERS, a_run, loss, noisy, rate

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
        {"columns": {"moe/expert_load_max_over_mean": flat(3.9)}, "facts": {"model.experts": 8}},  # of at most 4
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
