"""Single values that the libraries accept and fail on later: the Trainer's intervals, the model's sizes."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import InputError
from ...model.architecture_keys import checked_fields
from .machine import NOT_READ_YET, Setup
from .mesh import EXPERTS


def intervals(setup: Setup) -> Iterator[str]:
    """An interval of 0 divides by zero at the first step; a negative clipping norm turns gradients around."""
    for key in ("log_every_n_steps", "val_check_interval"):
        value = setup.trainer.get(key)
        if value is not None and not isinstance(value, str | dict) and not value > 0:
            off = "; trainer.limit_val_batches 0 turns validation off" if key == "val_check_interval" else ""
            yield f"trainer.{key} is {value}: give 1 or more{off}"
    clip = setup.trainer.get("gradient_clip_val")
    if clip is not None and not clip >= 0:
        yield f"trainer.gradient_clip_val is {clip}: give the largest norm, or 0 to turn clipping off"


def architecture_keys(setup: Setup) -> Iterator[str]:
    """A key that no configuration reads, before the data are tokenized; `build_config` refuses it afterwards."""
    given, pretrained = (getattr(setup.module, key, None) for key in ("architecture", "pretrained"))
    if setup.model_config is not NOT_READ_YET or pretrained or not isinstance(given, dict):
        return
    try:
        checked_fields(given)
    except InputError as error:
        yield str(error)


def architecture(setup: Setup) -> Iterator[str]:
    """What transformers builds, and what then fails in the first forward or trains nothing."""
    if setup.model_config in (NOT_READ_YET, None):
        return
    config = setup.model_config.get_text_config()
    layers, heads = getattr(config, "num_hidden_layers", 1), getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None)
    if isinstance(layers, int) and layers < 1:
        yield f"the model's num_hidden_layers is {layers}: give 1 or more; edit model.architecture"
    has_groups = isinstance(heads, int) and isinstance(keys, int) and not hasattr(config, "kv_lora_rank")
    if has_groups and heads % max(keys, 1):
        yield (
            f"the model's num_attention_heads {heads} is not a multiple of num_key_value_heads {keys}; edit"
            " model.architecture"
        )
    experts = {name: number for name in EXPERTS if isinstance(number := getattr(config, name, None), int)}
    chosen = getattr(config, "num_experts_per_tok", None)
    if experts and isinstance(chosen, int) and chosen > (number := next(iter(experts.values()))) > 0:
        yield f"the model's num_experts_per_tok {chosen} is more than its {number} experts; edit model.architecture"
