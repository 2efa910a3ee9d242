"""Histories of runs that never ran: a healthy one, of any length, and what to change of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dist_template.observe.history.metrics import Metrics
from dist_template.observe.history.run import History

Column = Callable[[np.ndarray], np.ndarray]  # (N,) shares of the training done, above 0 to 1, to (N,) values

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
    "perf/mfu": lambda done: noisy(np.full_like(done, 0.4), 0.02),
    "memory/allocated_gib": lambda done: noisy(np.full_like(done, 50.0)),
    "memory/reserved_gib": lambda done: np.full_like(done, 60.0),
    "memory/peak_share": lambda done: np.full_like(done, 0.8),
    "gpu/throttled": lambda done: np.zeros_like(done),
    "gpu/temperature_c": lambda done: np.full_like(done, 60.0),
    "rank/slowest_step_s": lambda done: noisy(np.full_like(done, 0.16), 0.02),
    "rank/slowest": lambda done: np.random.default_rng(1).integers(0, 8, len(done)).astype(float),
    "rank/slowest_over_median": lambda done: noisy(np.full_like(done, 1.05), 0.02),
    "moe/expert_load_max_over_mean": lambda done: noisy(1.5 + 2 * np.exp(-done / 0.01), 0.05),
    "moe/unused_experts": lambda done: np.where(done < 0.01, 20.0, 0.0),
    "health/clipped_share": lambda done: np.where(done < 0.05, 1.0, 0.05),
    "data/counted_share": lambda done: np.ones_like(done),
    "data/distinct_token_share": lambda done: np.full_like(done, 0.2),
}
EVAL: dict[str, Column] = {
    "eval/loss": lambda done: 3.05 + 7.8 * np.exp(-done / 0.05),
    "eval/bits_per_byte": lambda done: (3.05 + 7.8 * np.exp(-done / 0.05)) / math.log(2) / 4.5,
}
CONFIG = {
    "model.architecture": {"model_type": "deepseek_v3", "initializer_range": 0.02},
    "model.optim.learning_rate": 6e-4,
    "model.optim.warmup": 0.05,
    "model.optim.betas": [0.9, 0.95],
    "model.optim.weight_decay": 0.1,
    "model.blocks.compile": False,
    "model.blocks.checkpointing": "none",
    "data.seq_len": 2048,
    "data.global_batch_size": 256,
    "data.micro_batch_size": 8,
    "data.num_workers": 0,
    "data.cache_dir": "data_cache",
    "data.validation_share": 0.01,
    "trainer.gradient_clip_val": 1.0,
    "trainer.precision": "bf16-mixed",
    "trainer.strategy": "ddp",
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
    "model.attention": "sdpa",
    "data.accumulation": 4,
    "data.tokens_per_step": 2**19,
    "data.train_tokens": 1_000_000_000,
    "data.validation_tokens": 10_000_000,
    "data.unigram_bits_per_byte": 2.5,
    "data.counted_share": 1.0,
    "data.unshifted_share": 0.01,
    "data.distinct_tokens": 20_000,
    "data.duplicate_share": 0.001,
    "data.chat_share": None,
    "machine.world_size": 8,
    "machine.data_parallel_size": 8,
    "machine.hosts": ["node1"] * 4 + ["node2"] * 4,
    "machine.device": "NVIDIA H200",
    "machine.supports_bf16": True,
    "training.compiled": False,
    "training.strategy": "DDPStrategy",
}


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
    """A healthy run of `steps` steps, `upto` this share, and changed: logged `every` so many, validated ten times.

    One validation more comes before training.

    Args:
        columns: Metrics by name. None leaves one out.
        config, facts: Values by path.
        rest: `History`'s other fields.
    """
    config = {"trainer.max_steps": steps, "trainer.val_check_interval": max(steps // 10, 1), **CONFIG, **(config or {})}
    history = History(Path("runs/a/b"), config=nested(config), facts=nested(FACTS | (facts or {})), metrics=Metrics())
    history.environment = {"job_started": 0.0, "cpu_count": 16}
    history.goodput = {"start": 60.0, "productive": 0.5 * steps * upto, "validation": 0.01 * steps, "checkpoint": 20.0}
    for kind, frequency in ((COLUMNS, every), (EVAL, steps // 10)):
        made = {
            **kind,
            **{name: column for name, column in (columns or {}).items() if (name in EVAL) == (kind is EVAL)},
        }
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
