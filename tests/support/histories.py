"""Synthetic histories: a healthy run of a large model, with changes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dist_template.wings.diagnose import History

# Maps the (N,) completed shares of a training to (N,) values; a number stands for a constant.
Column = Callable[[np.ndarray], np.ndarray] | float

LAYERS, EXPERTS = 12, 16


def noisy(values: np.ndarray, share: float = 0.01) -> np.ndarray:
    return values * (1 + share * np.random.default_rng(0).standard_normal(len(values)))


def loss(done: np.ndarray) -> np.ndarray:
    """From ln(50,257) to 3."""
    return noisy(3 + 7.8 * np.exp(-done / 0.05))


COLUMNS: dict[str, Column] = {
    "train/loss": loss,
    "train/grad_norm": lambda done: noisy(0.4 + 2 * np.exp(-done / 0.02), 0.1),
    "train/learning_rate": lambda done: (
        6e-4 * np.minimum(done / 0.05, 0.55 + 0.45 * np.cos(math.pi * done))
    ),
    "perf/step_s": lambda done: noisy(np.full_like(done, 0.5), 0.05),
    "perf/data_wait_share": 0.01,
    "memory/allocated_gib": lambda done: noisy(np.full_like(done, 50.0)),
    "rank/slowest": lambda done: np.random.default_rng(1).integers(0, 8, len(done)),
    "rank/slowest_over_median": lambda done: noisy(np.full_like(done, 1.05), 0.02),
    "moe/expert_load_max_over_mean": lambda done: noisy(1.5 + 2 * np.exp(-done / 0.01), 0.05),
    "moe/unused_experts": lambda done: np.where(done < 0.01, 20.0, 0.0),
}
EVAL: dict[str, Column] = {"eval/loss": lambda done: 3.05 + 7.8 * np.exp(-done / 0.05)}
CONFIG = {
    "model.optim.learning_rate": 6e-4,
    "model.optim.warmup": 0.05,
    "data.seq_len": 2048,
    "data.num_workers": 0,
    "data.cache_dir": "data_cache",
    "trainer.precision": "bf16-mixed",
    "last_checkpoint.every_n_steps": 1000,
    "last_checkpoint.asynchronous": False,
}
FACTS = {
    "parameters.total": 300_000_000,
    "parameters.trainable": 300_000_000,
    "parameters.embedding": 40_000_000,
    "model.vocab_size": 50_257,
    "model.experts": EXPERTS,
    "model.experts_per_token": 2,
    "balance.has_bias": True,
    "balance.aux_loss_coef": 0.0,
    "model.layers": LAYERS,
    "machine.world_size": 8,
    "machine.hosts": ["node1"] * 4 + ["node2"] * 4,
    "machine.device": "NVIDIA H200",
    "machine.supports_bf16": True,
}


def a_run(
    steps: int = 10_000,
    every: int = 25,
    *,
    upto: float = 1.0,
    columns: dict[str, Column] | None = None,
    config: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    **rest: Any,
) -> History:
    """Returns a healthy run with changes, validated ten times and before the training: a log step
    `every` so many, the share `upto` completed; `rest` are other fields of `History`."""
    goodput = {"start": 60.0, "productive": 0.5 * steps * upto, "checkpoint": 20.0}
    history = History(
        Path("runs/a/b"),
        config=nested({"trainer.max_steps": steps} | CONFIG | (config or {})),
        facts=nested(FACTS | (facts or {})),
        environment={"job_started": 0.0, "cpu_count": 16},
        goodput=goodput | {"validation": 0.01 * steps},
    )
    evals = {name: (columns or {}).get(name, column) for name, column in EVAL.items()}
    kinds = (COLUMNS | (columns or {}), every, every), (evals, 0, steps // 10)
    for made, first, frequency in kinds:
        at = np.arange(first, int(steps * upto) + 1, frequency)
        values = {name: _values(column, at / steps) for name, column in made.items()}
        for index, step in enumerate(at.tolist()):
            line = {name: float(column[index]) for name, column in values.items()}
            history.metrics.add({"step": step, "time": 60 + 0.5 * step, **line})
    for name, value in rest.items():
        setattr(history, name, value)
    return history


def _values(column: Column, done: np.ndarray) -> np.ndarray:
    return np.full_like(done, column) if isinstance(column, int | float) else column(done)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return tree
