"""Options of the Trainer that are refused, with their replacements; values without an effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)

from ...model.any_module import owns_order
from ..defaults import TRAINER_DEFAULTS
from .machine import Setup

# Key: the value that is allowed, and what to do instead of another.
REPLACED: dict[str, tuple[Any, str]] = {
    "overfit_batches": (
        0.0,
        "data.py determines the order of samples: set data.repeat_first_batch true, as"
        " configs/preset/overfit.yaml does",
    ),
    "barebones": (False, "it forbids loggers, checkpoints and callbacks: remove the key"),
    "accumulate_grad_batches": (
        1,
        "it is derived, data.global_batch_size / (data.micro_batch_size x data-parallel"
        " processes); remove the key and edit those",
    ),
    "use_distributed_sampler": (False, "data.py or SampleOrder shards the samples: remove the key"),
    "model_registry": (None, "remove the key, and give --ckpt_path a folder"),
}
OF_AN_ORDER = ("overfit_batches", "accumulate_grad_batches")  # the Trainer's without an order
REFUSED_CALLBACKS = {
    StochasticWeightAveraging: "it copies the module before its model is built, and replaces the"
    " schedule: set model.optim.schedule warmup_stable_decay, or on one device and under DDP the"
    " callback EMAWeightAveraging",
    LearningRateFinder: "it trains with its own schedule before the first step: compare short runs"
    " with different --model.optim.learning_rate by the verb `compare`",
    BatchSizeFinder: "it needs a batch size in the module: compare short runs with different"
    " --data.micro_batch_size by the verb `compare`",
    GradientAccumulationScheduler: "accumulation is derived: edit data.global_batch_size",
}


def replaced_keys(setup: Setup) -> Iterator[str]:
    for key, (allowed, instead) in REPLACED.items():
        if key in OF_AN_ORDER and not owns_order(setup.data):
            continue
        if (given := setup.trainer.get(key, allowed)) != allowed:
            yield f"trainer.{key} {str(given).lower()} is not supported: {instead}"


def callbacks(setup: Setup) -> Iterator[str]:
    given = setup.trainer.get("callbacks") or []
    for callback in given if isinstance(given, list) else [given]:
        for kind, instead in REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                yield f"trainer.callbacks: {kind.__name__} is not supported: {instead}"
        if not setup.sharding.is_replicated and isinstance(callback, WeightAveraging):
            yield (
                f"trainer.callbacks: {type(callback).__name__} copies the full model and does not"
                f" work under {setup.sharding.name}, which shards it: use"
                " configs/strategy/ddp.yaml, or remove the callback"
            )


def manual_optimization(setup: Setup) -> Iterator[str]:
    """What a training step that calls backward and optimizers itself cannot have."""
    name, clip = type(setup.module).__name__, setup.trainer.get("gradient_clip_val")
    if setup.module.automatic_optimization or not setup.trains:
        return
    if not setup.sharding.is_replicated:
        # Several backward passes, and weights that are frozen for one: "resize storage" in FSDP2.
        yield (
            f"{name} optimizes manually (automatic_optimization is False), which does not work"
            f" under {setup.sharding.name}: use configs/strategy/ddp.yaml or one device"
        )
    if clip not in (None, 0, TRAINER_DEFAULTS["gradient_clip_val"]):
        yield (
            f"trainer.gradient_clip_val {clip}: {name} optimizes manually, so nothing clips for it:"
            " call self.clip_gradients in training_step, and remove the key"
        )
    if setup.trainer.get("accumulate_grad_batches", 1) != 1:
        yield (
            f"trainer.accumulate_grad_batches: {name} optimizes manually, so nothing accumulates"
            " for it: do so in training_step, and remove the key"
        )


def batch_norm(setup: Setup) -> Iterator[str]:
    has_options = not isinstance(setup.trainer.get("strategy") or "auto", str)
    if setup.trainer.get("sync_batchnorm") and has_options:
        yield (
            f"trainer.sync_batchnorm true is not supported under {setup.sharding.name}: use"
            " configs/strategy/ddp.yaml, or remove the key"
        )


def ignored(setup: Setup) -> Iterator[str]:
    """Keys of AdamW that another optimizer does not read."""
    if not setup.trains:
        return
    if setup.optim is not None and setup.optim.optimizer:
        name = setup.optim.optimizer["class_path"].rpartition(".")[2]
        why = f"--optimizer {name} has its own: give --optimizer.KEY, if it has that key"
        yield from without_effect("model.optim", setup.optim, {"betas", "eps"}, why)


def without_effect(section: str, given: Any, unread: set[str], why: str) -> Iterator[str]:
    """Yields a sentence for each key in `unread` of `given` that is not its default."""
    default = type(given)()
    for key in sorted(unread):
        if (value := getattr(given, key)) != getattr(default, key):
            yield f"{section}.{key} is {value!r} and has no effect ({why}), or remove the key"
