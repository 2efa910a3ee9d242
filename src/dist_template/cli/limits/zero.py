"""ZeroStrategy: what DeepSpeed lacks, and a user's DeepSpeed JSON against trainer, data and model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...errors import InputError
from ...parallel.deepspeed_config import Settings, batch_sizes, hidden_size
from ...parallel.zero import ZeroStrategy
from .machine import ARGS, Setup

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def clipping(setup: Setup) -> Iterator[str]:
    if isinstance(setup.strategy, ZeroStrategy) and setup.trainer.get("gradient_clip_algorithm") == "value":
        yield "trainer.gradient_clip_algorithm 'value': DeepSpeed clips by norm alone; set 'norm'"


def asynchronous(setup: Setup) -> Iterator[str]:
    if not isinstance(strategy := setup.strategy, ZeroStrategy) or not setup.saves_asynchronously:
        return
    zero = strategy.given["zero_optimization"]
    if "nvme" in [(zero.get(name) or {}).get("device") for name in ("offload_optimizer", "offload_param")]:
        yield (
            "last_checkpoint.asynchronous true cannot be had with state on NVMe, whose files DeepSpeed copies while"
            " training waits: set it to false"
        )


def offload(setup: Setup) -> Iterator[str]:
    if not isinstance(strategy := setup.strategy, ZeroStrategy):
        return
    if strategy.offload_parameters and strategy.stage != 3:
        yield (
            f"{ARGS}.offload_parameters needs ZeRO stage 3, which alone shards parameters, and the stage is"
            f" {strategy.stage}: set stage 3, or offload_parameters false"
        )
    zero = strategy.given["zero_optimization"]
    parts = [zero.get("offload_param") or {}, zero.get("offload_optimizer") or {}]
    for folder in {str(part.get("nvme_path")) for part in parts if part.get("device") == "nvme"}:
        if setup.machine.is_this_one and not Path(folder).is_dir():
            yield f"{ARGS}.nvme_path {folder!r} is no folder of this machine: give one on a fast local disk"


def checkpoints(setup: Setup) -> Iterator[str]:
    if not isinstance(strategy := setup.strategy, ZeroStrategy):
        return
    writer = (strategy.given.get("checkpoint") or {}).get("writer") or {}
    if writer.get("decoupled") or strategy.given.get("datastates_ckpt", False) is not False:
        yield (
            f"{ARGS}.config lets DeepSpeed write checkpoints after the save has returned, and they are hashed then:"
            " remove checkpoint.writer.decoupled and datastates_ckpt from the DeepSpeed file"
        )


def optimizer(setup: Setup) -> Iterator[str]:
    """DeepSpeed passes flat shards of many parameters: an optimizer that reads a matrix's rows or norm is wrong."""
    chosen = getattr(setup.optim, "optimizer", None)
    if not isinstance(strategy := setup.strategy, ZeroStrategy) or not chosen:
        return
    module, _, name = chosen["class_path"].rpartition(".")
    if "optimizer" in strategy.given:
        yield f"--optimizer {name}, and {ARGS}.config, the DeepSpeed file, has an `optimizer`: remove one of the two"
    allowed = module.startswith("torch.optim") and name in ELEMENTWISE
    if not allowed and not strategy.given.get("zero_allow_untested_optimizer"):
        yield (
            f"--optimizer {name}: ZeRO flattens parameters, which only element-wise optimizers allow: set one of"
            f" {', '.join(ELEMENTWISE)}, a file such as configs/strategy/fsdp2.yaml, or zero_allow_untested_optimizer"
            " true in a DeepSpeed file if it is one of those"
        )


def configuration(setup: Setup) -> Iterator[str]:
    """The strategy's own check: the JSON that DeepSpeed will get is made, and thrown away."""
    if not isinstance(strategy := setup.strategy, ZeroStrategy) or not setup.trains:
        return
    settings = Settings(
        accelerator=setup.machine.accelerator,
        precision=setup.machine.precision,
        gradient_clip_val=setup.trainer.get("gradient_clip_val") or 0.0,
        hidden_size=lambda: hidden_size(setup.module),
        **batch_sizes(setup.data, setup.machine.world_size, setup.trainer.get("accumulate_grad_batches") or 1),
    )
    try:
        strategy.complete_config(settings)
    except InputError as error:
        yield str(error)
