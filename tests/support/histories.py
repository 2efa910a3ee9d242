"""Synthetic histories: a healthy run with changes, and for each rule a fault and a near miss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dist_template.wings.diagnose import History
from dist_template.wings.history import Metrics

# Maps the (N,) completed shares of a training to (N,) values.
Column = Callable[[np.ndarray], np.ndarray]

LAYERS, EXPERTS = 12, 16


def noisy(values: np.ndarray, share: float = 0.01) -> np.ndarray:
    return values * (1 + share * np.random.default_rng(0).standard_normal(len(values)))


def rate(done: np.ndarray) -> np.ndarray:
    return 6e-4 * np.minimum(done / 0.05, 0.55 + 0.45 * np.cos(math.pi * done))


def loss(done: np.ndarray) -> np.ndarray:
    """From ln(50,257) to 3."""
    return noisy(3 + 7.8 * np.exp(-done / 0.05))


COLUMNS: dict[str, Column] = {
    "train/loss": loss,
    "train/grad_norm": lambda done: noisy(0.4 + 2 * np.exp(-done / 0.02), 0.1),
    "train/learning_rate": rate,
    "train/tokens": lambda done: 5e8 * done,
    "perf/step_s": lambda done: noisy(np.full_like(done, 0.5), 0.05),
    "perf/data_wait_share": lambda done: noisy(np.full_like(done, 0.01), 0.3),
    "memory/allocated_gib": lambda done: noisy(np.full_like(done, 50.0)),
    "gpu/throttled": lambda done: np.zeros_like(done),
    "rank/slowest_step_s": lambda done: noisy(np.full_like(done, 0.16), 0.02),
    "rank/slowest": lambda done: np.random.default_rng(1).integers(0, 8, len(done)).astype(float),
    "rank/slowest_over_median": lambda done: noisy(np.full_like(done, 1.05), 0.02),
    "moe/expert_load_max_over_mean": lambda done: noisy(1.5 + 2 * np.exp(-done / 0.01), 0.05),
    "moe/unused_experts": lambda done: np.where(done < 0.01, 20.0, 0.0),
    "data/counted_share": lambda done: np.ones_like(done),
}
EVAL: dict[str, Column] = {"eval/loss": lambda done: 3.05 + 7.8 * np.exp(-done / 0.05)}
CONFIG = {
    "model.architecture": {"model_type": "deepseek_v3"},
    "model.optim.learning_rate": 6e-4, "model.optim.warmup": 0.05, "model.optim.betas": [0.9, 0.95],
    "model.optim.weight_decay": 0.1, "model.blocks.checkpointing": "none", "data.seq_len": 2048,
    "data.global_batch_size": 256, "data.micro_batch_size": 8, "data.num_workers": 0,
    "data.cache_dir": "data_cache", "trainer.gradient_clip_val": 1.0,
    "trainer.precision": "bf16-mixed", "last_checkpoint.every_n_steps": 1000,
    "last_checkpoint.asynchronous": False,
}  # fmt: skip
FACTS = {
    "parameters.total": 300_000_000, "parameters.trainable": 300_000_000,
    "parameters.embedding": 40_000_000, "model.vocab_size": 50_257, "model.experts": EXPERTS,
    "model.experts_per_token": 2, "balance.has_bias": True, "balance.aux_loss_coef": 0.0,
    "model.layers": LAYERS, "machine.world_size": 8,
    "machine.hosts": ["node1"] * 4 + ["node2"] * 4,
    "machine.device": "NVIDIA H200", "machine.supports_bf16": True,
}  # fmt: skip


def a_run(
    steps: int = 10_000,
    every: int = 25,
    *,
    upto: float = 1.0,
    columns: dict[str, Column | None] | None = None,
    config: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    **rest: Any,
) -> History:
    """Returns a healthy run with changes, validated ten times and before the training.

    Args:
        steps: Optimizer steps.
        every: Steps between log steps.
        upto: Completed share of the training.
        columns: Metrics by name. None removes one.
        config: Values by path.
        facts: Values by path.
        rest: Other fields of `History`.
    """
    own = {"trainer.max_steps": steps, "trainer.val_check_interval": max(steps // 10, 1)}
    history = History(
        Path("runs/a/b"),
        config=nested(own | CONFIG | (config or {})),
        facts=nested(FACTS | (facts or {})),
        metrics=Metrics(),
    )
    history.environment = {"job_started": 0.0, "cpu_count": 16}
    history.goodput = {"start": 60.0, "productive": 0.5 * steps * upto, "checkpoint": 20.0}
    history.goodput["validation"] = 0.01 * steps
    for kind, frequency in ((COLUMNS, every), (EVAL, steps // 10)):
        changed = columns or {}
        made = kind | {k: changed[k] for k in changed if (k in EVAL) == (kind is EVAL)}
        at = np.arange(0 if kind is EVAL else frequency, int(steps * upto) + 1, frequency)
        values = {name: column(at / steps) for name, column in made.items() if column}
        for index, step in enumerate(at.tolist()):
            line = {name: float(column[index]) for name, column in values.items()}
            history.metrics.add({"step": step, "time": 60 + 0.5 * step, **line})
    for name, value in rest.items():
        setattr(history, name, getattr(history, name) | value if name == "environment" else value)
    return history


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return tree


# ---- faults --------------------------------------------------------------------------------------


def flat(value: float) -> Column:
    return lambda done: np.full_like(done, value)


def incident(
    step: int, loss: float = math.nan, rank: int = 0, decision: str = "stop", **more: Any
) -> dict[str, Any]:
    ranks = [{"rank": r, "loss": 2.0, "rows": [[r]]} for r in range(8)]
    found = {"step": step, "kind": "non_finite", "decision": decision, "loss": loss}
    found["suspects"] = [rank]
    return found | {"ranks": ranks} | more


def _spikes(done: np.ndarray) -> np.ndarray:
    values = loss(done)
    values[[150, 250, 350]] *= 1.5
    return values


def _loss(change: Column, **more: Any) -> dict[str, Any]:
    return {"columns": {"train/loss": change}, **more}


def _metric(name: str, column: Column, **more: Any) -> dict[str, Any]:
    return {"columns": {name: column}, **more}


_CPU = {"machine.device": "cpu", "machine.supports_bf16": False}
_OFTEN = {"last_checkpoint.every_n_steps": 10}
_FP32 = {"trainer.precision": "32-true"}
# rule: (changes to a healthy run that the rule must find, changes that it must not find)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss_not_finite": (
        {"incidents": [incident(500)]},
        {"incidents": [incident(500, loss=9.0, kind="spike", decision="skip")]},
    ),
    "loss_diverges": (
        _loss(lambda done: loss(done) + 8 * np.maximum(done - 0.7, 0)),
        _loss(lambda done: loss(done) + 0.3 * np.maximum(done - 0.7, 0)),
    ),
    "early_loss_jump": (
        _loss(lambda done: loss(done) + 9 * ((done > 0.0025) & (done < 0.02)), every=5),
        _loss(lambda done: loss(done) + 0.5 * ((done > 0.0025) & (done < 0.02)), every=5),
    ),
    "loss_spikes": (_loss(_spikes), _loss(lambda done: noisy(loss(done), 0.03))),
    "loss_not_decreasing": (
        _loss(lambda done: noisy(np.full_like(done, 10.82), 0.002)),
        # fine-tuning: the first loss is low
        _loss(lambda done: noisy(np.full_like(done, 3.0), 0.002)),
    ),
    "labels_masked": (_metric("train/loss", flat(0.0)), _metric("train/loss", flat(0.2))),
    "experts_unused": (
        _metric("moe/unused_experts", flat(0.6 * LAYERS * EXPERTS)),
        _metric("moe/unused_experts", flat(3.0)),
    ),
    "experts_overloaded": (  # the highest possible load is 4
        _metric("moe/expert_load_max_over_mean", flat(3.9), facts={"model.experts": 8}),
        _metric("moe/expert_load_max_over_mean", flat(2.5)),
    ),
    "memory_grows": (
        _metric("memory/allocated_gib", lambda done: noisy(40 + 20 * done, 0.001)),
        # the near miss: an allocator that grows in the first quarter, and by single pages after it
        _metric(
            "memory/allocated_gib", lambda done: 40 + 10 * np.minimum(done / 0.25, 1) + 0.01 * done
        ),
    ),
    "waits_for_data": (
        _metric("perf/data_wait_share", flat(0.4)),  # the near miss: after validations only
        _metric("perf/data_wait_share", lambda done: np.where(done * 10 % 1 < 0.01, 0.6, 0.02)),
    ),
    "slow_rank": (
        {"columns": {"rank/slowest": flat(5.0), "rank/slowest_over_median": flat(1.8)}},
        _metric("rank/slowest_over_median", flat(1.8)),  # another rank each time
    ),
    "fp32_on_gpu": ({"config": _FP32}, {"config": _FP32, "facts": _CPU}),
    "checkpoint_overhead_high": (
        {"config": _OFTEN, "goodput": {"productive": 5000.0, "checkpoint": 2000.0}},
        {"config": _OFTEN, "goodput": {"productive": 5000.0, "checkpoint": 400.0}},
    ),
    "validation_overhead_high": (
        {"goodput": {"productive": 5000.0, "validation": 4000.0}},
        {"goodput": {"productive": 5000.0, "validation": 400.0}},
    ),
}
