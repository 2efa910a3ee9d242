"""Low utilization of GPUs names its cause and the key to change, and a busy GPU has no finding."""

from typing import Any

import pytest

from dist_template.wings.diagnose import Finding, engine
from tests.support.histories import a_run, assert_followed_advice_is_not_given

IDLE = {"gpu/utilization": 0.35, "gpu/utilization_min": 0.3, "memory/peak_share": 0.8}
BUSY = {"gpu/utilization": 0.97, "gpu/utilization_min": 0.95, "memory/peak_share": 0.8}
BATCH = {"data.micro_batch_size": 4, "data.global_batch_size": 256}
MESH = {"class_path": "MeshStrategy", "init_args": {"fsdp_size": "auto", "dp_replicate_size": 1}}
ZERO = {"class_path": "ZeroStrategy", "init_args": {"stage": 2, "offload_optimizer": True}}
LARGE = {"parameters.total": 7_000_000_000, "parameters.trainable": 7_000_000_000}
SIZE = {"model.layers": 32, "model.width": 4096, "training.strategy": "MeshStrategy"}
MANY = {"machine.world_size": 16, "machine.hosts": [f"node{rank // 8}" for rank in range(16)]}

# name: changes of a healthy run, words of the title, the first key to change
CAUSES: dict[str, tuple[dict[str, Any], str, str]] = {
    "data": (
        {"columns": IDLE | {"perf/data_wait_share": 0.5}},
        "training waits for data",
        "data.num_workers",
    ),
    "small batch": (
        {"columns": IDLE | {"memory/peak_share": 0.1}},
        "no measured cause",
        "data.micro_batch_size",
    ),
    "slow rank": (
        {
            "columns": BUSY
            | {"gpu/utilization_min": 0.4, "rank/slowest": 5.0, "rank/slowest_over_median": 1.8}
        },
        "all ranks wait for rank 5",
        "",  # a machine's fault has no key
    ),
    "checkpoints": (
        {
            "columns": IDLE,
            "config": {"last_checkpoint.every_n_steps": 10},
            "goodput": {"productive": 5000.0, "checkpoint": 4000.0},
        },
        "checkpoints take too much time",
        "last_checkpoint.every_n_steps",
    ),
    "validations": (
        {
            "columns": IDLE,
            "config": {"trainer.val_check_interval": 50},
            "goodput": {"productive": 3000.0, "validation": 6000.0},
        },
        "validations take too much time",
        "trainer.val_check_interval",
    ),
    "communication": (
        {
            "columns": IDLE | {"perf/step_s": 2.0},
            "config": {"trainer.strategy": MESH},
            "facts": LARGE | SIZE | MANY,
        },
        "ranks wait for messages",
        "data.micro_batch_size",
    ),
    "offload": (
        {
            "columns": IDLE | {"perf/step_s": 4.0},
            "config": {"trainer.strategy": ZERO},
            "facts": LARGE | SIZE | {"machine.hosts": ["node1"] * 8},
        },
        "the host updates the weights",
        "trainer.strategy.init_args.offload_optimizer",
    ),
}


def diagnosed(**changes: Any) -> list[Finding]:
    changes["config"] = BATCH | changes.get("config", {})
    return engine.diagnose(a_run(**changes))


def low(findings: list[Finding]) -> Finding:
    (finding,) = (each for each in findings if each.rule == "gpu_utilization_low")
    return finding


def test_low_utilization_names_its_cause() -> None:
    for name, (changes, title, key) in CAUSES.items():
        findings = diagnosed(**changes)
        finding = low(findings)
        assert title in finding.title, (name, finding.title)
        assert "gpu/utilization" in finding.evidence, name
        keys = [change.key for change in finding.causes[0].changes]
        assert keys[:1] == ([key] if key else []), (name, finding.causes)
        changed = [change for cause in finding.causes for change in cause.changes]
        assert all(change.to != change.now for change in changed), (name, changed)
        assert [each.rule for each in findings] == ["gpu_utilization_low"], (name, "one finding")
    assert diagnosed(columns=BUSY) == [], "a busy GPU"
    assert diagnosed() == [], "no gauges: a CPU"


@pytest.mark.parametrize("kind", CAUSES)
def test_no_advice_is_a_setting_that_the_run_has(kind: str) -> None:
    changes = CAUSES[kind][0]
    history = a_run(**changes | {"config": BATCH | changes.get("config", {})})
    assert_followed_advice_is_not_given(history, engine.diagnose(history))


@pytest.mark.parametrize("kind", CAUSES)
def test_a_busy_gpu_has_no_finding_of_low_utilization(kind: str) -> None:
    """Whatever else there is."""
    changes = dict(CAUSES[kind][0])
    changes["columns"] = changes["columns"] | BUSY
    rules = [finding.rule for finding in diagnosed(**changes)]
    assert "gpu_utilization_low" not in rules


def test_the_largest_cause_comes_first_and_others_follow() -> None:
    waits = IDLE | {"perf/data_wait_share": 0.2}
    often = CAUSES["checkpoints"][0]
    finding = low(diagnosed(**often | {"columns": waits}))
    keys = [change.key for cause in finding.causes for change in cause.changes]
    first, second = "last_checkpoint.every_n_steps", "data.num_workers"
    assert "checkpoints" in finding.title and keys.index(first) < keys.index(second)


def test_the_slow_rank_is_shown_by_the_least_utilized_gpu() -> None:
    """Ranks that wait in a collective count as utilized."""
    finding = low(diagnosed(**CAUSES["slow rank"][0]))
    assert finding.ranks == [5] and "least utilized GPU 40%" in finding.evidence
    assert "node2" in finding.title


def test_a_micro_batch_grows_within_memory_and_keeps_the_global_batch() -> None:
    roomy = {"columns": IDLE | {"memory/peak_share": 0.15}}
    causes = low(diagnosed(**roomy)).causes
    (change,) = causes[0].changes
    assert (change.now, change.to) == (4, 16), "four times 0.15 fits 0.85, eight times do not"
    whole = {"config": {"data.micro_batch_size": 4, "data.global_batch_size": 32}}
    changes = low(diagnosed(**roomy, **whole)).causes[0].changes
    assert {change.key: change.to for change in changes} == {
        "data.micro_batch_size": 16,
        "data.global_batch_size": 128,
    }, "one micro-batch a step: the global batch grows too"
    full = low(diagnosed(columns=IDLE | {"memory/peak_share": 0.7}))
    keys = [change.key for cause in full.causes for change in cause.changes]
    assert "data.micro_batch_size" not in keys and keys == ["config"], "a profile"


def test_a_gpu_far_below_its_peak_names_slow_kernels() -> None:
    columns = BUSY | {"perf/mfu": 0.1}
    config = {"model.attention": "eager", "model.blocks.compile": False}
    (finding,) = diagnosed(columns=columns, config=config)
    assert finding.rule == "gpu_compute_slow" and "10.0%" in finding.evidence
    keys = [change.key for cause in finding.causes for change in cause.changes]
    assert keys == ["model.attention", "model.blocks.compile"]
    assert diagnosed(columns=BUSY | {"perf/mfu": 0.45}, config=config) == []
