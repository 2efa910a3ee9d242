"""Options of Lightning's Trainer that this project replaces: refused, with what to use instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)

from ...model.any_module import owns_order
from .machine import Setup

# Key: the value that is allowed, and what to do instead of another.
REPLACED: dict[str, tuple[Any, str]] = {
    "overfit_batches": (
        0.0,
        "data.py owns the order of samples: set data.repeat_first_batch true, as configs/preset/overfit.yaml does",
    ),
    "barebones": (
        False,
        "it forbids the loggers, checkpoints and callbacks of every run: the verb `bench` measures what they cost",
    ),
    "accumulate_grad_batches": (
        1,
        "it is derived, data.global_batch_size / (data.micro_batch_size x data-parallel processes); remove the key and"
        " edit those",
    ),
    "use_distributed_sampler": (False, "data.py, or the callback SampleOrder, shards the samples: remove the key"),
    "model_registry": (None, "checkpoints are folders here: remove the key, and give --ckpt_path a folder"),
}
OF_AN_ORDER = ("overfit_batches", "accumulate_grad_batches")  # a plain datamodule leaves them to the Trainer
REFUSED_CALLBACKS = {
    StochasticWeightAveraging: "it copies the module before its model is built, and replaces the schedule: set"
    " model.optim.schedule warmup_stable_decay, or the callback EMAWeightAveraging",
    LearningRateFinder: "it trains with a schedule of its own before the first step: compare short runs with different"
    " --model.optim.learning_rate by the verb `compare`",
    BatchSizeFinder: "data.micro_batch_size is no property of the module: the verb `bench` tries twice its size",
    GradientAccumulationScheduler: "accumulation is derived: edit data.global_batch_size",
}


def replaced_keys(setup: Setup) -> Iterator[str]:
    for key, (allowed, instead) in REPLACED.items():
        if key in OF_AN_ORDER and not owns_order(setup.data):
            continue
        if (given := setup.trainer.get(key, allowed)) != allowed:
            yield f"trainer.{key} {_as_yaml(given)} is not supported: {instead}"


def callbacks(setup: Setup) -> Iterator[str]:
    given = setup.trainer.get("callbacks") or []
    for callback in given if isinstance(given, list) else [given]:
        for kind, instead in REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                yield f"trainer.callbacks: {kind.__name__} is not supported: {instead}"


def batch_norm(setup: Setup) -> Iterator[str]:
    if setup.trainer.get("sync_batchnorm") and not isinstance(setup.strategy, str):
        yield (
            f"trainer.sync_batchnorm true is not supported under {type(setup.strategy).__name__}: use"
            " configs/strategy/ddp.yaml, or remove the key"
        )


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
