"""Completes a DeepSpeed configuration from the trainer's, the data's and the model's settings.

A value that is also set elsewhere (the batch in `data`, the precision in `trainer`) must be equal
in the JSON, or "auto". `pin_memory` may be "auto" as well; every other "auto" becomes DeepSpeed's
default. The optimizer and the schedule are set in model.optim only."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...by_tokens import batch_at
from ...errors import InputError, reason
from ...records import flatten, read_text
from ..configured import Configured, overrides
from .check import normalized

__all__ = ["json_of"]

AUTO = "auto"
KEY = "trainer.strategy.init_args.config"
Config = Mapping[str, Any]
HALF_SECTION = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}


def json_of(strategy: Any, setup: Configured) -> dict[str, Any]:
    """Returns what a strategy gives to DeepSpeed in the training of `setup`, without "auto". Raises
    InputError if it is not DeepSpeed's, or its file conflicts with other keys."""
    if not hasattr(strategy, "complete_config"):
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise InputError(
            f"trainer.strategy {name} is not DeepSpeed's and has no JSON: give --config"
            " strategy/zero1, zero2 or zero3"
        )
    return strategy.complete_config(setup)


def read(config: str | Path | Config) -> dict[str, Any]:
    """Returns a user's configuration unchanged, but old keys have today's names. Raises InputError
    if the file is missing, is no JSON object, has no ZeRO stage, or a value in place of a
    section."""
    if not isinstance(config, Mapping):
        try:
            config = json.loads(read_text(Path(config)), object_pairs_hook=_each_once)
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"{KEY}: cannot read {str(config)!r}: {reason(error)}; give a DeepSpeed JSON"
            ) from error
    if not isinstance(config, Mapping):
        raise InputError(f"{KEY} is {json.dumps(config)[:40]}; DeepSpeed wants an object, {{…}}")
    config = normalized(config, KEY)
    stage = config.get("zero_optimization", {}).get("stage")
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        given = "" if stage is None else f", but {json.dumps(stage)}"
        raise InputError(
            f"{KEY} has no zero_optimization.stage of 1, 2 or 3{given}: set one, or give --config"
            " strategy/ddp in place of the file, which trains without ZeRO"
        )
    return config


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON. Raises ValueError for a key that is given twice, as DeepSpeed's
    own reader does: the last one would count."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has the key {key!r} twice")
        found[key] = value
    return found


def resolve(config: Config, setup: Configured) -> dict[str, Any]:
    """Returns `config` as DeepSpeed gets it: complete, without "auto", and equal to the settings of
    `setup`. Raises InputError, which lists all values that conflict."""
    accumulation, processes = (
        setup.trainer.get("accumulate_grad_batches") or 1,
        setup.machine.world_size,
    )
    micro = getattr(setup.data, "micro_batch_size", 1)
    if hasattr(setup.data, "global_batch_size"):
        accumulation = max(1, batch_at(setup.data.global_batch_size, 0) // (micro * processes))
    half = HALF_SECTION.get(setup.machine.precision)
    ours: dict[str, object] = {
        "train_batch_size": micro * processes * accumulation,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": float(setup.trainer.get("gradient_clip_val") or 0.0),
    }
    config = copy.deepcopy(dict(config))
    if has_autocast := config.get("torch_autocast", {}).get("enabled"):
        ours["torch_autocast.dtype"] = {"bf16": "bfloat16", "fp16": "float16"}.get(
            half or "", "float32"
        )
    for section in ("bf16", "fp16"):
        enabled = section == half and not has_autocast
        if enabled or section in config:
            ours[f"{section}.enabled"] = enabled
    given, conflicts = flatten(config), []
    for key, value in ours.items():
        if given.get(key, AUTO) not in (AUTO, value):
            says = f"the DeepSpeed file says {key} {json.dumps(given[key])}"
            conflicts.append(
                f"{says}, and trainer and data {json.dumps(value)}: make them equal, or write "
                f'"auto"'
            )
        *sections, name = key.split(".")
        (config.setdefault(sections[0], {}) if sections else config)[name] = value
    # DeepSpeed's optimizer would also decay norms and biases, and Lightning does not step its
    # scheduler. Hugging Face's files name the types of both, and write "auto" for the parameters.
    has_schedule = any(key.startswith("scheduler.params") for key in given)
    usual = {
        "optimizer.type": "AdamW",
        "scheduler.type": given.get("scheduler.type") if has_schedule else AUTO,
    }
    for key, value in given.items():
        if key.startswith(("optimizer.", "scheduler.")) and value not in (AUTO, usual.get(key)):
            says = f"{key} is {json.dumps(value)} in the DeepSpeed file"
            is_own = overrides(setup.module, "configure_optimizers")
            has_keys = hasattr(setup.module, "optim") or not is_own
            by = "model.optim" if has_keys else "configure_optimizers"
            conflicts.append(f"{says}, and {by} sets optimizer and schedule: remove it")
    if conflicts:
        raise InputError(f"{KEY}: " + "\n  ".join(conflicts))
    config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
    config.setdefault("zero_allow_untested_optimizer", True)  # module.py may build any optimizer
    config.setdefault("zero_force_ds_cpu_optimizer", False)  # zero.py says why
    # DeepSpeed's own throughput would synchronize the device twice per micro-batch.
    config.setdefault("timers", {"throughput": {"enabled": False}})
    for section in ("offload_optimizer", "offload_param"):
        if config["zero_optimization"].get(section, {}).get("pin_memory") == AUTO:
            config["zero_optimization"][section]["pin_memory"] = setup.machine.accelerator != "cpu"
    return without_auto(config)


def without_auto(config: Config) -> dict[str, Any]:
    """Returns the configuration without the keys whose value is "auto"."""
    kept = {}
    for key, value in config.items():
        if value != AUTO:
            kept[key] = without_auto(value) if isinstance(value, dict) else value
    return kept
