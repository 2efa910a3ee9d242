"""ZeroStrategy: what DeepSpeed does not support, and conflicts of its JSON with other keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...errors import InputError
from ...parallel.deepspeed_config import Settings, batch_sizes, hidden_size
from ...parallel.zero import ZeroStrategy
from .machine import ARGS, Setup

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")
ELEMENTWISE += ("RMSprop", "Rprop", "SGD")


def zero(setup: Setup) -> Iterator[str]:
    """All checks of a ZeroStrategy."""
    if isinstance(setup.strategy, ZeroStrategy):
        for check in (_options, _nvme, _optimizer, _configuration):
            yield from check(setup, setup.strategy)


def _options(setup: Setup, strategy: ZeroStrategy) -> Iterator[str]:
    if setup.trainer.get("gradient_clip_algorithm") == "value":
        yield "trainer.gradient_clip_algorithm 'value': DeepSpeed clips by norm only; set 'norm'"
    if strategy.offload_parameters and strategy.stage != 3:
        yield (
            f"{ARGS}.offload_parameters needs ZeRO stage 3, which shards parameters, but the stage"
            f" is {strategy.stage}: set stage 3, or offload_parameters false"
        )
    if strategy.stage == 3 and getattr(getattr(setup.module, "preference", None), "precompute", 0):
        yield "model.preference.precompute does not work under ZeRO stage 3: set it to false"
    writer = (strategy.given.get("checkpoint") or {}).get("writer") or {}
    if writer.get("decoupled") or strategy.given.get("datastates_ckpt", False) is not False:
        yield (
            f"{ARGS}.config makes DeepSpeed write checkpoints after the save has returned, but they"
            " are hashed then: remove checkpoint.writer.decoupled and datastates_ckpt from the"
            " DeepSpeed file"
        )


def _nvme(setup: Setup, strategy: ZeroStrategy) -> Iterator[str]:
    zero = strategy.given["zero_optimization"]
    parts = [zero.get("offload_param") or {}, zero.get("offload_optimizer") or {}]
    folders = {str(part.get("nvme_path")) for part in parts if part.get("device") == "nvme"}
    if folders and setup.saves_asynchronously:
        yield (
            "last_checkpoint.asynchronous true does not work with state on NVMe, which DeepSpeed"
            " copies synchronously: set it to false"
        )
    for folder in folders:
        if setup.machine.is_this_one and not Path(folder).is_dir():
            yield (
                f"{ARGS}.nvme_path {folder!r} is not a folder of this machine: give one on a fast"
                " local disk"
            )


def _optimizer(setup: Setup, strategy: ZeroStrategy) -> Iterator[str]:
    """DeepSpeed passes flat shards of parameters to the optimizer, which must be element-wise."""
    chosen = getattr(setup.optim, "optimizer", None)
    if not chosen:
        return
    module, _, name = chosen["class_path"].rpartition(".")
    if "optimizer" in strategy.given:
        yield (
            f"--optimizer {name}, and {ARGS}.config, the DeepSpeed file, has an `optimizer`: remove"
            " one of the two"
        )
    allowed = module.startswith("torch.optim") and name in ELEMENTWISE
    if not allowed and not strategy.given.get("zero_allow_untested_optimizer"):
        yield (
            f"--optimizer {name}: ZeRO flattens parameters, which only element-wise optimizers"
            f" allow: set one of {', '.join(ELEMENTWISE)}, a file such as"
            " configs/strategy/fsdp2.yaml, or zero_allow_untested_optimizer true in a DeepSpeed"
            " file if it is one of those"
        )


def _configuration(setup: Setup, strategy: ZeroStrategy) -> Iterator[str]:
    """The strategy's own check: completes the JSON that DeepSpeed would get."""
    if not setup.trains:
        return
    try:
        strategy.complete_config(settings_of(setup))
    except InputError as error:
        yield str(error)


def settings_of(setup: Setup) -> Settings:
    """Returns what a DeepSpeed JSON takes from the other keys."""
    accumulation = setup.trainer.get("accumulate_grad_batches") or 1
    return Settings(
        accelerator=setup.machine.accelerator,
        precision=setup.machine.precision,
        gradient_clip_val=setup.trainer.get("gradient_clip_val") or 0.0,
        hidden_size=lambda: hidden_size(setup.module),
        **batch_sizes(setup.data, setup.machine.world_size, accumulation),
    )
