"""Options of the Trainer that are refused, with their replacements; values without an effect."""

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
from ...model.optim import OptimConfig
from .machine import Setup

# Key: the value that is allowed, and what to do instead of another.
REPLACED: dict[str, tuple[Any, str]] = {
    "overfit_batches": (0.0, "set data.repeat_first_batch true, as --config preset/overfit does"),
    "barebones": (False, "it forbids loggers, checkpoints and callbacks: remove the key"),
    "use_distributed_sampler": (False, "the data module shards the samples: remove the key"),
    "model_registry": (None, "remove the key, and give --ckpt_path a folder"),
}
OF_AN_ORDER = ("overfit_batches", "use_distributed_sampler")  # the Trainer's without an order
# What to do instead: with the keys of this library's modules and data, and without them.
REFUSED_CALLBACKS: dict[type, tuple[str, str]] = {
    StochasticWeightAveraging: (
        "set model.optim.schedule warmup_stable_decay, or use EMAWeightAveraging",
        "use EMAWeightAveraging",
    ),
    LearningRateFinder: (
        "compare runs with different model.optim.learning_rate by the verb `compare`",
        "compare runs with different learning rates by the verb `compare`",
    ),
    BatchSizeFinder: (
        "compare runs with different data.micro_batch_size by the verb `compare`",
        "compare runs with different sizes of a batch by the verb `compare`",
    ),
    GradientAccumulationScheduler: (
        "give phases of data.global_batch_size",
        "set trainer.accumulate_grad_batches",
    ),
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
        for kind, (by_keys, otherwise) in REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                of_data = kind in (BatchSizeFinder, GradientAccumulationScheduler)
                has_keys = owns_order(setup.data) if of_data else setup.optim is not None
                instead = by_keys if has_keys else otherwise
                yield f"trainer.callbacks: {kind.__name__} is not supported: {instead}"
        if not setup.sharding.is_replicated and isinstance(callback, WeightAveraging):
            yield (
                f"trainer.callbacks: {type(callback).__name__} does not work under"
                f" {setup.sharding.name}, which shards the model: use --config strategy/ddp, or"
                " remove the callback"
            )


def manual_optimization(setup: Setup) -> Iterator[str]:
    """Several backward passes, and weights that are frozen for one: "resize storage" in FSDP2."""
    if (
        setup.trains
        and not setup.module.automatic_optimization
        and not setup.sharding.is_replicated
    ):
        yield (
            f"{type(setup.module).__name__} optimizes manually (automatic_optimization is False),"
            f" which does not work under {setup.sharding.name}: use --config strategy/ddp or one"
            " device"
        )


def ignored(setup: Setup) -> Iterator[str]:
    """Keys of AdamW that another optimizer does not read. Muon has AdamW beside it."""
    chosen = setup.optim.optimizer_class if setup.trains and setup.optim is not None else None
    name = chosen["class_path"].rpartition(".")[2] if chosen else "Muon"
    if name != "Muon":
        why = f"--optimizer {name} has its own: give --optimizer.KEY, if it has that key"
        yield from without_effect("model.optim", setup.optim, {"betas", "eps", "optimizer"}, why)
    if setup.trains and setup.optim is not None:
        yield from _of_the_schedule(setup.optim)


def _of_the_schedule(optim: OptimConfig) -> Iterator[str]:
    """Keys of a schedule that another one does not read. --lr_scheduler and phases replace them
    all, and `warmup` and `schedule` with them: files that come with this library set those."""
    section = "model.optim"
    if optim.lr_scheduler_class or isinstance(optim.learning_rate, list):
        unread = {"min_learning_rate_share", "decay_share"}
        instead = "--lr_scheduler" if optim.lr_scheduler_class else f"{section}.learning_rate"
        yield from without_effect(section, optim, unread, f"{instead} replaces the schedule")
        return
    why = f"{section}.schedule is {optim.schedule}: set"
    if optim.schedule != "warmup_stable_decay":
        yield from without_effect(section, optim, {"decay_share"}, f"{why} warmup_stable_decay")
    if optim.schedule not in ("cosine", "warmup_stable_decay"):
        yield from without_effect(section, optim, {"min_learning_rate_share"}, f"{why} cosine")


def without_effect(section: str, given: Any, unread: set[str], why: str) -> Iterator[str]:
    """Yields a sentence for each key in `unread` of `given` that is not its default."""
    default = type(given)()
    for key in sorted(unread):
        if (value := getattr(given, key)) != getattr(default, key):
            yield f"{section}.{key} is {value!r} and has no effect ({why}), or remove the key"
