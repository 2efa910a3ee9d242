"""Completes a DeepSpeed configuration: fills each "auto" and lists all conflicts.

A value that is also set elsewhere (the batch in `data`, the precision in `trainer`) must be equal
in the JSON, or "auto". "auto" means what it means in Hugging Face's integration; `pin_memory` may
be "auto" as well. The optimizer and the schedule are set in model.optim only."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, reason
from ..records import flatten
from .facts import Configured

AUTO, ACCUMULATION = "auto", "data.global_batch_size / (data.micro_batch_size x processes)"
KEY = "trainer.strategy.init_args.config"

# The keys that DeepSpeed 0.19 reads; it ignores any other key silently.
KNOWN_KEYS = frozenset(
    """activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel flops_profiler
    fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting
    hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
    progressive_layer_drop quantize_training scheduler seq_parallel_communication_data_type sparse_attention
    sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization""".split()
)
HALF_SECTION = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}
DEEPSPEED_AUTO = {"data_types.keep_in_fp32_modules"}  # DeepSpeed gives "auto" a meaning here


@dataclass(frozen=True)
class Settings:
    """Values that trainer, data and model set."""

    accelerator: str  # Lightning's name: cpu, cuda …
    precision: str  # Lightning's name
    micro_batch_size: int  # sequences per process per forward pass
    global_batch_size: int
    accumulation: int
    gradient_clip_val: float  # 0: off
    hidden_size: Callable[[], int]  # only called if an "auto" depends on it


def settings_of(setup: Configured) -> Settings:
    """Returns what a DeepSpeed JSON takes from the other keys."""
    accumulation, processes = setup.trainer.get("accumulate_grad_batches") or 1, setup.machine.world_size
    micro = getattr(setup.data, "micro_batch_size", 1)
    if hasattr(setup.data, "global_batch_size"):
        accumulation = max(1, setup.data.global_batch_size // (micro * processes))
    return Settings(
        setup.machine.accelerator, setup.machine.precision, micro, micro * processes * accumulation, accumulation,
        setup.trainer.get("gradient_clip_val") or 0.0, hidden_size=lambda: hidden_size(setup.module),
    )  # fmt: skip


def hidden_size(module: Any) -> int:
    """Returns the width of the model that `module` will build.

    Raises:
        InputError: its configuration has no `hidden_size`.
    """
    from transformers import AutoConfig

    try:
        if module.pretrained:
            config = AutoConfig.from_pretrained(module.pretrained, trust_remote_code=False)
        else:
            config = AutoConfig.for_model(**module.architecture)
        return config.get_text_config().hidden_size
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        which = "a bucket size or threshold is auto, which depends on the model's hidden_size"
        raise InputError(f"{which}, and {type(module).__name__} has none ({reason(error)}): write a number") from error


def read(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Returns a user's configuration unchanged, but "bfloat16" is renamed "bf16".

    Raises:
        InputError: the file is missing, is no JSON object, has an unknown key or no ZeRO stage.
    """
    if not isinstance(config, Mapping):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except OSError as error:
            found = f"{KEY}: cannot read {str(config)!r} ({error.strerror})"
            raise InputError(f"{found}; give a DeepSpeed JSON") from error
        except ValueError as error:
            raise InputError(f"{KEY}: {str(config)!r} is not JSON: {reason(error)}") from error
    if not isinstance(config, Mapping):
        raise InputError(f"{KEY} is {json.dumps(config)[:40]}; DeepSpeed wants an object, {{…}}")
    unknown = []
    for key in config:
        if key not in KNOWN_KEYS:
            near = ", ".join(difflib.get_close_matches(key, KNOWN_KEYS, n=2))
            unknown.append(f"DeepSpeed has no key {key!r}" + (f"; similar keys: {near}" if near else ""))
    refuse(unknown)
    config = copy.deepcopy(dict(config))
    if "bfloat16" in config:
        config["bf16"] = config.pop("bfloat16")
    if config.get("zero_optimization", {}).get("stage") not in (1, 2, 3):
        raise InputError(f"{KEY} has no zero_optimization.stage of 1, 2 or 3; ddp has none")
    return config


def refuse(conflicts: list[str]) -> None:
    """Raises one InputError that lists all `conflicts` of the DeepSpeed file, if there are any."""
    if len(conflicts) == 1:
        raise InputError(f"{KEY}: {conflicts[0]}")
    if conflicts:
        lines = "".join(f"\n  {each}" for each in conflicts)
        raise InputError(f"{KEY} has {len(conflicts)} conflicts:{lines}")


def resolve(config: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Returns `config` as DeepSpeed gets it: complete, without "auto", and equal to `settings`.

    Raises:
        InputError: lists all values that conflict, cannot be "auto", or are invalid in DeepSpeed.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    config, conflicts = copy.deepcopy(dict(config)), []
    for key, value, place in (
        ("train_batch_size", settings.global_batch_size, "data.global_batch_size"),
        ("train_micro_batch_size_per_gpu", settings.micro_batch_size, "data.micro_batch_size"),
        ("gradient_accumulation_steps", settings.accumulation, ACCUMULATION),
        ("gradient_clipping", float(settings.gradient_clip_val), "trainer.gradient_clip_val"),
    ):
        conflicts += _agree(config, key, value, place)
    conflicts += _agree_on_precision(config, settings.precision)
    conflicts += _drop_optimizer(config)
    config.setdefault("zero_allow_untested_optimizer", True)  # module.py may build any optimizer
    config.setdefault("zero_force_ds_cpu_optimizer", False)  # zero.py says why
    # DeepSpeed's own throughput would synchronize the device twice per micro-batch.
    config.setdefault("timers", {"throughput": {"enabled": False}})
    try:
        _fill_sizes(config["zero_optimization"], settings)
    except InputError as error:
        conflicts.append(str(error))
    else:
        for key, value in flatten(config).items():
            if value == AUTO and key not in DEEPSPEED_AUTO:
                conflicts.append(f"{key} is auto, and no setting gives it a value; write one")
        try:
            DeepSpeedZeroConfig(**config["zero_optimization"])  # DeepSpeed's own validation
        except ValidationError as error:
            for each in error.errors():
                place = ".".join(str(part) for part in ("zero_optimization", *each["loc"]))
                conflicts.append(f"{place}: {each['msg']}, given {each['input']!r}")
    refuse(conflicts)
    return config


def _agree(config: dict[str, Any], key: str, value: object, place: str) -> list[str]:
    """Sets the dotted `key` to `value`, that of `place`. Returns a conflict with the file."""
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    given, config[name] = config.get(name, AUTO), value
    if given in (AUTO, value):
        return []
    says = f"the DeepSpeed file says {key} {json.dumps(given)}, {place} is {json.dumps(value)}"
    return [f'{says}: make them equal, or write "auto" in the file']


def _agree_on_precision(config: dict[str, Any], precision: str) -> list[str]:
    """Enables bf16, fp16 or torch_autocast as the precision needs. Returns the conflicts."""
    half, conflicts = HALF_SECTION.get(precision), []
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled"):
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(half or "", "float32")
        place = f"that of trainer.precision {precision}"
        conflicts += _agree(config, "torch_autocast.dtype", dtype, place)
    for section in ("bf16", "fp16"):
        enabled = section == half and not autocast.get("enabled")
        if enabled or section in config:
            place = f"with trainer.precision {precision}"
            if autocast.get("enabled"):
                place += " and torch_autocast"
            conflicts += _agree(config, f"{section}.enabled", enabled, f"what fits {place}")
    return conflicts


def _drop_optimizer(config: dict[str, Any]) -> list[str]:
    """Removes `optimizer` and `scheduler`. Returns a conflict for each value that is not "auto".

    DeepSpeed's optimizer would also decay norms and biases, and Lightning does not step DeepSpeed's scheduler."""
    given = {name: config.pop(name, None) or {} for name in ("optimizer", "scheduler")}
    if given["optimizer"].get("type") == "AdamW":
        given["optimizer"] = given["optimizer"] | {"type": AUTO}
    of_schedule = given["scheduler"].get("params")
    if of_schedule and {*of_schedule.values()} == {AUTO}:  # Hugging Face's files name a type too
        given["scheduler"] = {}
    return [
        f"{key} is {json.dumps(value)} in the DeepSpeed file, and model.optim sets optimizer and schedule: remove it"
        for key, value in flatten(given).items()
        if value != AUTO
    ]


def _fill_sizes(zero: dict[str, Any], settings: Settings) -> None:
    """Fills sizes (elements) by Hugging Face's formulas; pins memory if there is a GPU."""
    formulas: dict[str, Callable[[int], int]] = {
        "reduce_bucket_size": lambda width: width * width,
        "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
        "stage3_param_persistence_threshold": lambda width: 10 * width,
    }
    for key, formula in formulas.items():
        if zero.get(key) == AUTO:
            zero[key] = formula(settings.hidden_size())
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("pin_memory") == AUTO:
            zero[section]["pin_memory"] = settings.accelerator != "cpu"
