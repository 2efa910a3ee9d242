"""Checks under every strategy: precision, batches, optimizer, schedule, the model's sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from ...errors import InputError, reason
from ...model.any_module import has_validation, typed_attribute
from ...model.optim import build_optimizer, build_schedule
from ...parallel.answers.mesh import experts_of
from ...parallel.blocks import BlockConfig
from ...parallel.configured import NOT_READ_YET
from .machine import Setup

NOT_OFFERED = {
    "Muon": "it updates matrices alone, and the embeddings, the head, biases and norms of a model"
    " need another optimizer",
    "SparseAdam": "it takes sparse gradients alone, and the gradients of a model are dense",
}


def strategy(setup: Setup) -> Iterator[str]:
    return setup.sharding.refusals(setup)


def precision(setup: Setup) -> Iterator[str]:
    given = setup.machine.precision
    if given == "16-mixed" and setup.machine.accelerator == "cpu":
        yield "trainer.precision '16-mixed' does not exist on a CPU: set bf16-mixed or 32-true"


def blocks(setup: Setup) -> Iterator[str]:
    config = typed_attribute(setup.module, "blocks", BlockConfig)
    if config is None:
        return
    if config.checkpoint_every < 1:
        every = config.checkpoint_every
        yield f"model.blocks.checkpoint_every {every}: set 1 for every block, n for every n-th"


def batches(setup: Setup) -> Iterator[str]:
    """The data module's own check, with the number of data-parallel ranks."""
    if not setup.trains or not hasattr(setup.data, "check"):
        return
    try:
        ranks = setup.sharding.data_parallel(setup.machine.world_size)
    except InputError:
        return  # the strategy reports that its sizes do not fit
    try:
        setup.data.check(ranks)
    except InputError as error:
        yield str(error)


def optimization(setup: Setup) -> Iterator[str]:
    """Builds the optimizer and the schedule for one weight: optim.py and torch check arguments."""
    optim, steps = setup.optim, setup.num_steps
    if not setup.trains or optim is None:
        return
    name = (optim.optimizer or {}).get("class_path", "").removeprefix("torch.optim.")
    if name in NOT_OFFERED:
        yield f"--optimizer {name}: {NOT_OFFERED[name]}; remove it for AdamW, or choose another"
        return
    try:
        optimizer = build_optimizer(nn.Linear(1, 1), optim)
        if steps is not None:
            build_schedule(optimizer, optim, steps)
    except InputError as error:
        yield str(error)
        return
    except ValueError as error:
        yield f"model.optim: {reason(error)}"
        return
    for key, value in optimizer.param_groups[0].items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"--optimizer {name}: {key} is {value}; give a number"


def plateau(setup: Setup) -> Iterator[str]:
    """reduce_on_plateau never acts without a validation."""
    optim, trainer = setup.optim, setup.trainer
    if not setup.trains or optim is None or not optim.waits_for_validation:
        return
    key = "model.optim.schedule 'reduce_on_plateau'"
    if optim.lr_scheduler:
        key = "--lr_scheduler ReduceLROnPlateau"
    none = ""
    if trainer.get("limit_val_batches") == 0:
        none = "trainer.limit_val_batches is 0"
    elif not has_validation(setup.module, setup.data):
        has_share = hasattr(setup.data, "validation_share")
        none = "data.validation_share is 0" if has_share else "there is no val_dataloader"
    if none:
        yield f"{key} needs validations, but {none}: edit one of the two"
        return
    every = trainer.get("val_check_interval")
    if isinstance(every, int) and every > (setup.num_steps or every):
        yield (
            f"{key} needs validations, but the first is at step {every}, after the end at"
            f" {trainer['max_steps']}: edit trainer.val_check_interval or trainer.max_steps"
        )


def of_module(setup: Setup) -> Iterator[str]:
    """The module's own check, as TextModule has for adapters, keys and preferences."""
    check = getattr(setup.module, "refusals", None)
    if callable(check):
        yield from check(setup)


def architecture(setup: Setup) -> Iterator[str]:
    """Sizes that transformers accepts, but with which forward fails or nothing is trained."""
    if setup.model_config in (NOT_READ_YET, None):
        return
    config, edit = setup.model_config.get_text_config(), "edit model.architecture"
    layers = getattr(config, "num_hidden_layers", 1)
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None)
    if isinstance(layers, int) and layers < 1:
        yield f"the model's num_hidden_layers is {layers}: give 1 or more; {edit}"
    if isinstance(heads, int) and isinstance(groups, int) and not hasattr(config, "kv_lora_rank"):
        if heads % max(groups, 1):
            which = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
            yield f"the model's {which}; {edit}"
    (_, number), chosen = experts_of(config), getattr(config, "num_experts_per_tok", None)
    if isinstance(chosen, int) and chosen > number > 0:
        yield f"the model's num_experts_per_tok {chosen} is more than its {number} experts; {edit}"
