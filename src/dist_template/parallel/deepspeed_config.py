"""The DeepSpeed configuration: this package's own or a user's JSON, every "auto" filled in and every conflict told.

A value that stands in two places (the batch in `data` and in the JSON, the precision in `trainer` and in the JSON) must
be the same in both, or "auto" in the JSON. The meaning of "auto" is that of Hugging Face's integration, so that files
written for it work; `pin_memory` may be "auto" as well. Lightning refuses some of these keys and overlooks the others.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, reason
from ..records import flatten

AUTO, ACCUMULATION = "auto", "data.global_batch_size / (data.micro_batch_size x processes)"
KEY = "trainer.strategy.init_args.config"

# What DeepSpeed 0.19 reads; it passes over any other key without a word.
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
SCHEDULE = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}  # ours: DeepSpeed's name
MAY_STAY_AUTO = {"data_types.keep_in_fp32_modules"}  # DeepSpeed's own "auto"


@dataclass(frozen=True)
class Settings:
    """What trainer, data and model say.

    Args:
        accelerator: Lightning's name: cpu, cuda …
        precision: Lightning's name.
        micro_batch_size: Sequences per process per forward.
        global_batch_size: Sequences per optimizer step.
        accumulation: Micro-batches per optimizer step.
        gradient_clip_val: Largest gradient norm; 0 is off.
        num_steps: Optimizer steps of the training; None where no end is known.
        optim: An OptimConfig; None for a module without one.
        hidden_size: Asks the model's configuration for its width; only called where an "auto" depends on it.
    """

    accelerator: str
    precision: str
    micro_batch_size: int
    global_batch_size: int
    accumulation: int
    gradient_clip_val: float
    num_steps: int | None
    optim: Any
    hidden_size: Callable[[], int]


def batch_sizes(data: Any, processes: int, accumulation: int) -> dict[str, int]:
    """The batch's numbers as fields of Settings; with the Trainer's accumulation where the data does not say."""
    micro = getattr(data, "micro_batch_size", 1)
    if hasattr(data, "global_batch_size"):
        accumulation = max(1, data.global_batch_size // (micro * processes))
    return {
        "micro_batch_size": micro,
        "global_batch_size": micro * processes * accumulation,
        "accumulation": accumulation,
    }


def hidden_size(module: Any) -> int:
    """The width of the model that `module` will build.

    Raises:
        InputError: its configuration, if it has one, names no `hidden_size`.
    """
    from transformers import AutoConfig

    try:
        if module.pretrained:
            config = AutoConfig.from_pretrained(module.pretrained, trust_remote_code=False)
        else:
            config = AutoConfig.for_model(**module.architecture)
        return config.get_text_config().hidden_size
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise InputError(
            f"a bucket size or threshold is auto, which follows from the model's hidden_size, and "
            f"{type(module).__name__} has none ({reason(error)}): write a number"
        ) from error


def read(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A user's configuration, as it stands, with top-level keys that DeepSpeed knows.

    Raises:
        InputError: there is no such file, it is no JSON object, or has an unknown key.
    """
    if not isinstance(config, Mapping):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{KEY}: cannot read {str(config)!r} ({error.strerror}); give a DeepSpeed JSON") from error
        except ValueError as error:
            raise InputError(f"{KEY}: {str(config)!r} is not JSON: {reason(error)}") from error
    if not isinstance(config, Mapping):
        raise InputError(f"{KEY} holds {json.dumps(config)[:40]}; DeepSpeed wants an object, {{…}}")
    refuse([_unknown(key) for key in config if key not in KNOWN_KEYS])
    config = copy.deepcopy(dict(config))
    if "bfloat16" in config:
        config["bf16"] = config.pop("bfloat16")
    if config.get("zero_optimization", {}).get("stage") not in (1, 2, 3):
        raise InputError(f"{KEY} sets no zero_optimization.stage of 1, 2 or 3; for none of them use strategy: ddp")
    return config


def refuse(conflicts: list[str]) -> None:
    """Raise one InputError that lists all `conflicts` of the DeepSpeed file; return if there are none."""
    if len(conflicts) == 1:
        raise InputError(f"{KEY}: {conflicts[0]}")
    if conflicts:
        raise InputError(f"{KEY} has {len(conflicts)} conflicts:" + "".join(f"\n  {each}" for each in conflicts))


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, KNOWN_KEYS, n=2)
    return f"DeepSpeed knows no key {key!r}" + (f"; near it are {', '.join(near)}" if near else "")


def tidy(config: dict[str, Any]) -> dict[str, Any]:
    """Take out of Lightning's own configuration what has no effect; returns its `zero_optimization`."""
    zero = config["zero_optimization"]
    offloads = [zero[name] for name in ("offload_optimizer", "offload_param") if name in zero]
    if not any(offload["device"] == "nvme" for offload in offloads):
        config.pop("aio")
    for offload in offloads:
        if offload["device"] != "nvme":
            for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"):
                offload.pop(key, None)
    if not any(config["activation_checkpointing"].values()):
        config.pop("activation_checkpointing")  # model.blocks does it, the same under every strategy
    if zero["stage"] == 3:
        zero.pop("allgather_partitions")
        zero.pop("allgather_bucket_size")
    else:
        zero.pop("sub_group_size")
    return zero


def resolve(config: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """`config` as DeepSpeed gets it: complete, without "auto", agreeing with `settings`.

    Raises:
        InputError: values conflict with `settings`, have no meaning as "auto", or are none of DeepSpeed's; all of them.
    """
    config, conflicts = copy.deepcopy(dict(config)), []
    for key, value, place in (
        ("train_batch_size", settings.global_batch_size, "data.global_batch_size"),
        ("train_micro_batch_size_per_gpu", settings.micro_batch_size, "data.micro_batch_size"),
        ("gradient_accumulation_steps", settings.accumulation, ACCUMULATION),
        ("gradient_clipping", float(settings.gradient_clip_val), "trainer.gradient_clip_val"),
    ):
        conflicts += _agree(config, key, value, place)
    conflicts += _agree_on_precision(config, settings.precision)
    conflicts += _drop_optimizer(config, settings)
    config.setdefault("zero_allow_untested_optimizer", True)  # module.py may build any
    config.setdefault("zero_force_ds_cpu_optimizer", False)  # zero.py says why
    try:
        _fill_sizes(config["zero_optimization"], settings)
    except InputError as error:
        conflicts.append(str(error))
    else:
        autos = [key for key, value in flatten(config).items() if value == AUTO and key not in MAY_STAY_AUTO]
        conflicts += [f"{key} is auto, which nothing here gives a value; write one" for key in autos]
        conflicts += _invalid_in_zero(config["zero_optimization"])
    refuse(conflicts)
    return config


def _agree(config: dict[str, Any], key: str, value: Any, place: str) -> list[str]:
    """Set the dotted `key` to `value`, which is set in `place`; returns the conflict if the file has another value."""
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    given, config[name] = config.get(name, AUTO), value
    return _compare(key, given, value, place)


def _compare(key: str, given: Any, value: Any, place: str) -> list[str]:
    if given in (AUTO, value):
        return []
    return [
        f"the DeepSpeed file says {key} {json.dumps(given)}, {place} is {json.dumps(value)}: make them equal, or write"
        ' "auto" in the file'
    ]


def _agree_on_precision(config: dict[str, Any], precision: str) -> list[str]:
    """One of bf16, fp16 and torch_autocast for a half precision, none for 32-true; returns the conflicts."""
    half, conflicts = HALF_SECTION.get(precision), []
    autocast = config.get("torch_autocast", {})
    if autocast.get("enabled"):
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(half or "", "float32")
        conflicts += _agree(config, "torch_autocast.dtype", dtype, f"that of trainer.precision {precision}")
    for section in ("bf16", "fp16"):
        enabled = section == half and not autocast.get("enabled")
        if enabled or section in config:
            place = f"with trainer.precision {precision}" + (" and torch_autocast" if autocast.get("enabled") else "")
            conflicts += _agree(config, f"{section}.enabled", enabled, f"what fits {place}")
    return conflicts


def _drop_optimizer(config: dict[str, Any], settings: Settings) -> list[str]:
    """Remove `optimizer` and `scheduler`, which optim.py builds; returns where they say otherwise than it does.

    A DeepSpeed optimizer would decay norms and biases too, and a DeepSpeed scheduler is none of Lightning's.
    """
    given = flatten({name: config.pop(name) for name in ("optimizer", "scheduler") if config.get(name)})
    says = _optimization(settings) if settings.optim else {}
    conflicts = []
    for key, value in given.items():
        if key in says:
            conflicts += _compare(key, value, *says[key])
        elif key == "scheduler.type" and settings.optim:
            conflicts.append(
                f"DeepSpeed has no scheduler for model.optim.schedule {settings.optim.schedule}, and the file names"
                f" {value}: remove scheduler from the file"
            )
        else:
            conflicts.append(f"{key} has no counterpart here; remove it, optimizer and schedule are set in model.optim")
    return conflicts


def _optimization(settings: Settings) -> dict[str, tuple[Any, str]]:
    """DeepSpeed's names for what `model.optim` says: the value, and the place that says it."""
    optim, steps = settings.optim, settings.num_steps
    assert optim is not None
    warmup = optim.warmup if optim.warmup >= 1 else optim.warmup * steps if steps else None
    schedule = (SCHEDULE.get(optim.schedule), f"DeepSpeed's name for model.optim.schedule {optim.schedule}")
    return {
        "optimizer.type": ("AdamW", "the optimizer of optim.py"),
        "optimizer.params.lr": (optim.learning_rate, "model.optim.learning_rate"),
        "optimizer.params.betas": (list(optim.betas), "model.optim.betas"),
        "optimizer.params.eps": (optim.eps, "model.optim.eps"),
        "optimizer.params.weight_decay": (optim.weight_decay, "model.optim.weight_decay"),
        "optimizer.params.torch_adam": (True, "whether optim.py takes torch's"),
        "optimizer.params.adam_w_mode": (True, "decoupled decay in optim.py"),
        **({"scheduler.type": schedule} if schedule[0] else {}),
        "scheduler.params.warmup_min_lr": (0, "the start of the warm-up"),
        "scheduler.params.warmup_max_lr": (optim.learning_rate, "model.optim.learning_rate"),
        "scheduler.params.warmup_num_steps": (warmup and int(warmup), "model.optim.warmup, in steps,"),
        "scheduler.params.warmup_type": ("linear", "the shape of the warm-up"),
        "scheduler.params.warmup_min_ratio": (0, "the start of the warm-up"),
        "scheduler.params.cos_min_ratio": (optim.min_learning_rate_share, "model.optim.min_learning_rate_share"),
        "scheduler.params.total_num_steps": (steps, "trainer.max_steps"),
    }


def _fill_sizes(zero: dict[str, Any], settings: Settings) -> None:
    """Hugging Face's formulas for sizes, in elements, from the model's width; memory is pinned where there is a GPU."""
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


def _invalid_in_zero(zero: Mapping[str, Any]) -> Iterator[str]:
    """Have DeepSpeed's own model check the section before any process starts; yields each thing that it refuses."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        for each in error.errors():
            place = ".".join(str(part) for part in ("zero_optimization", *each["loc"]))
            yield f"{place}: {each['msg']}, given {each['input']!r}"
