"""Checks a user's DeepSpeed JSON by DeepSpeed's own configuration classes, before a process starts.

DeepSpeed reads its configuration on every rank when the engine is built: a misspelt key of a
section ends there in a traceback, one at the top is ignored, and a few keys fail in the first step.
Verified on deepspeed 0.19.8. Without torch until `refusals` is called."""

import contextlib
import copy
import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Generator, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from ...errors import InputError, first_line

Config = Mapping[str, Any]
SECTIONS = """bf16 bfloat16 fp16 amp zero_optimization optimizer scheduler activation_checkpointing
aio autotuning checkpoint comms_logger compile compression_training csv_monitor comet
curriculum_learning data_efficiency data_types datastates_ckpt elasticity expert_parallel
flops_profiler hybrid_engine monitor_config pipeline sparse_attention tensor_parallel tensorboard
timers torch_autocast wandb weight_quantization""".split()
OF_ZERO = "offload_optimizer offload_param zenflow".split()  # sections, or null
OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
# Modules whose constants are the names of keys: DeepSpeed has no list, and ignores other names.
CONSTANTS = """runtime.constants runtime.zero.config runtime.config monitor.config
runtime.activation_checkpointing.config runtime.swap_tensor.constants profiling.constants
comm.constants elasticity.constants autotuning.constants runtime.data_pipeline.constants
compression.constants nebula.constants runtime.checkpoint_engine.datastates.constants""".split()
OTHER_NAMES = """bfloat16 comet compile csv_monitor tensorboard wandb monitor_config timers
torch_autocast weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
datastates_ckpt expert_parallel tensor_parallel hybrid_engine checkpoint data_types pipeline
sequence_parallel_size inference quantize_training use_data_before_expert_parallelism
steps_per_print wall_clock_breakdown hybridengine nebula vocabulary_size""".split()
# What changes the model, its ranks or its batches behind the strategy, the data and the
# checkpoints: key, the value that is off, what to use.
BEHIND = (
    ("tensor_parallel.autotp_size", (0, 1), "use --config strategy/fsdp2_tp"),
    ("tensor_parallel.tp_size", (0, 1), "use --config strategy/fsdp2_tp"),
    ("sequence_parallel_size", (1,), "use --config strategy/fsdp2_cp"),
    ("expert_parallel.enabled", (False,), "use --config strategy/fsdp2_ep"),
    ("zero_optimization.mics_shard_size", (-1,), "use --config strategy/hsdp"),
    # it wants one deepspeed.zero.Init, and the model is built in several
    ("zero_optimization.zero_hpz_partition_size", (0, 1), "use --config strategy/hsdp"),
    # it wants DeepSpeedCPUAdam alone
    ("zero_optimization.offload_optimizer.ratio", (1,), "set 1"),
    ("zero_optimization.zenflow", (None,), "remove it"),
    ("amp.enabled", (False,), "set trainer.precision bf16-mixed"),
    ("elasticity.enabled", (False,), "set cluster.min_nodes, and start by `launch`"),
    ("hybrid_engine.enabled", (False,), "remove it"),
    ("autotuning.enabled", (False,), "use the verb `sweep`"),
    ("compile.deepcompile", (False,), "remove it"),
    ("curriculum_learning.enabled", (False,), "set data.seq_len"),
    ("data_efficiency.enabled", (False,), "remove it"),
    # DeepSpeed wants the number of layers, which Lightning does not pass on
    ("activation_checkpointing.contiguous_memory_optimization", (False,), "set it to false"),
)
ON_GPUS = "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights"


def normalized(config: Config, key: str) -> dict[str, Any]:
    """Returns a user's configuration with today's names of old keys, without sections that are
    null. Raises InputError, which begins with `key`, if a value stands where a section belongs."""
    config = copy.deepcopy(dict(config))
    for name in SECTIONS:
        value = config.get(name, {})
        if value is None:
            del config[name]
        elif not isinstance(value, Mapping) and not (name == "datastates_ckpt" and value is False):
            raise InputError(_no_section(key, name, value))
    zero = config.get("zero_optimization", {})
    for old, new in OLD_OFFLOAD.items():
        if zero.pop(old, False) is True and new not in zero:
            zero[new] = {"device": "cpu"}
    for name in OF_ZERO:
        value = zero.get(name, {})
        if value is None:
            del zero[name]
        elif not isinstance(value, Mapping):
            raise InputError(_no_section(key, f"zero_optimization.{name}", value))
    if "bfloat16" in config:
        config["bf16"] = config.pop("bfloat16")
    return config


def _no_section(key: str, name: str, value: object) -> str:
    example = {"fp16": '{"enabled": true}', "bf16": '{"enabled": true}'}.get(name, '{"KEY": …}')
    if name.startswith("zero_optimization"):
        example = '{"device": "cpu"}' if "." in name else '{"stage": 2}'
    return f"{key}: {name} is {json.dumps(value)[:40]}; DeepSpeed wants a section, {example}"


def refusals(config: Config, accelerator: str) -> Iterator[str]:
    """Yields why DeepSpeed, or this library's training under it, refuses `config`, which has no
    "auto" any more."""
    for name, off, cure in BEHIND:
        value: Any = config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value not in off:
            yield f"{name} is {json.dumps(value)}, and is not supported here: {cure}"
    zero = config["zero_optimization"]
    for name in ON_GPUS.split():
        if zero.get(name) and accelerator == "cpu":
            yield f"zero_optimization.{name} needs kernels for GPUs: remove it on CPUs"
    if (config.get("aio") or {}).get("use_gds") and accelerator == "cpu":
        yield "aio.use_gds copies from a GPU's memory to NVMe: set it to false on CPUs"
    known = _names_at_the_top()
    for name in config:
        if name not in known and not name.startswith(("_", "/", "#")):
            near = get_close_matches(name, [*known, *SECTIONS], 1, 0.8)
            hint = f"; did you mean {near[0]}?" if near else ": remove it"
            yield f"{name} is not a key of DeepSpeed{hint}"
            return
    yield from _of_deepspeed(config)


def lacks_on_this_machine(config: Config) -> str:
    """Returns why this machine cannot train with `config`, "" if it can. DeepSpeed builds its
    asynchronous I/O at the first start: without libaio, ranks wait for the build for minutes, and
    fail then."""
    zero = config["zero_optimization"]
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("device") == "nvme" and not _has_aio():
            why = "needs libaio with its headers, which this machine lacks"
            return f"zero_optimization.{section}.device nvme {why}: install libaio-dev, or set cpu"
    return ""


def _has_aio() -> bool:
    with _quiet(), _without_output_of_compilers():
        from deepspeed.ops.op_builder.async_io import AsyncIOBuilder

        return AsyncIOBuilder().is_compatible(verbose=False)


@contextlib.contextmanager
def _without_output_of_compilers() -> Generator[None]:
    """Inside, standard error of this process and of its children is lost."""
    with open(os.devnull, "wb") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _names_at_the_top() -> set[str]:
    found = {*SECTIONS, *OTHER_NAMES}
    with _quiet():
        for name in CONSTANTS:
            try:
                module = importlib.import_module(f"deepspeed.{name}")
            except ImportError:  # of another version
                continue
            found |= {value for value in vars(module).values() if isinstance(value, str)}
    return found


def _of_deepspeed(config: Config) -> Iterator[str]:
    """Yields what DeepSpeed's configuration classes say."""
    given = copy.deepcopy(dict(config))
    micro, steps = (
        given.get(name, 1)
        for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    given["train_batch_size"] = micro * steps  # of one process: no process group is here
    with _quiet():
        from deepspeed.runtime.config import DeepSpeedConfig

        try:
            DeepSpeedConfig(given)
        except Exception as error:  # pydantic's, AssertionError, TypeError, …
            details = getattr(error, "errors", None)
            if details is None:
                yield first_line(error)
                return
            kind = type(error).__name__ and getattr(error, "title", "")
            for detail in details():
                yield _sentence(detail, str(kind), config)


def _sentence(detail: Mapping[str, Any], kind: str, config: Config) -> str:
    """Returns a sentence of one of pydantic's errors in the class `kind`."""
    names = [str(name) for name in detail["loc"]]
    section = _section(kind, names, config)
    where = ".".join([section, *names] if section else names)
    if not names:  # about several keys
        return f"{section}: {detail['msg'].removeprefix('Assertion failed, ')}"
    if detail["type"] != "extra_forbidden":
        value = json.dumps(detail.get("input"), default=str)[:60]
        what = re.sub(r"^Input should be", "give", detail["msg"])
        what = re.sub(r"^give a valid (?=int)", "give an ", what)
        return f"{where} is {value}: {what}"
    from deepspeed.runtime import config_utils

    near: list[str] = []
    for model in _below(config_utils.DeepSpeedConfigModel):
        if model.__name__ == kind or len(names) > 1:  # a section in it has a class of its own
            near = near or get_close_matches(names[-1], model.model_fields, 1, 0.8)
    hint = f"; did you mean {near[0]}?" if near else ": remove it"
    return f"{where} is not a key of DeepSpeed{hint}"


def _section(kind: str, names: list[str], config: Config) -> str:
    """Returns the section whose class is `kind`: the one that has the key of the error."""
    if kind == "DeepSpeedZeroConfig":
        return "zero_optimization"
    sections = {name: value for name, value in config.items() if isinstance(value, Mapping)}
    has = [name for name, value in sections.items() if names and names[0] in value]
    named = [name for name in has if name.replace("_", "") in kind.lower()]
    return [*named, *has, ""][0]


def _below(kind: type) -> Iterator[Any]:
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """DeepSpeed logs to standard output, also at its import."""
    with contextlib.redirect_stdout(sys.stderr):
        logger = logging.getLogger("DeepSpeed")
        import deepspeed  # noqa: F401

        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
