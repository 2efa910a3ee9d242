"""Synthetic histories: a healthy run of a large model, with changes."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dist_template.wings.diagnose import Finding, History, engine
from tests import ROOT

SHIPPED = ROOT / "src" / "dist_template" / "configs"

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


def assert_followed_advice_is_not_given(history: History, findings: list[Finding]) -> None:
    """Each proposed value becomes the run's, and the same metrics are diagnosed again."""
    for finding in findings:
        for change in (each for cause in finding.causes for each in cause.changes):
            again = engine.diagnose(with_setting(history, change.key, change.to))
            causes = [cause for one in again for cause in one.causes]
            advised = [(each.key, each.to) for cause in causes for each in cause.changes]
            assert (change.key, change.to) not in advised, (finding.rule, change.flag)


def with_setting(history: History, key: str, value: Any) -> History:
    """Returns the history of a run with this setting; the key `config` adds a shipped file."""
    config = copy.deepcopy(history.config)
    if key == "config":
        _merge(config, yaml.safe_load((SHIPPED / f"{value}.yaml").read_text("utf-8")))
        return replace(history, config=config)
    *parents, leaf = key.split(".")
    place = config
    for name in parents:
        place = _section(place, name)
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    _section(place, leaf)[leaf] = value
    return replace(history, config=config)


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns where a key is: a class's arguments may be named without `init_args`."""
    return tree["init_args"] if name not in tree and "init_args" in tree else tree


def _merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    """Adds the content of another file to a configuration; a key with + adds to a list."""
    for key, value in other.items():
        if key.endswith("+"):
            tree[key[:-1]] = [*(tree.get(key[:-1]) or []), *value]
        elif isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value
