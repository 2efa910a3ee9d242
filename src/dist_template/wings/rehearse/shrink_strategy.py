"""Shrinks a strategy to a few processes: each mesh size above 1 becomes 2, or 4."""

from __future__ import annotations

import copy
import itertools
import json
from math import gcd
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...parallel import data_parallel_size
from ...parallel.pipeline.costs import stages_per_rank

PERSISTENT = 64  # elements: ZeRO-3 then keeps norms unsharded and shards matrices, as at full size
REPLACED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
REPLACED += ("bf16", "fp16")  # keys of a DeepSpeed file that the Trainer's settings replace
MESH = ("dp_replicate_size", "fsdp_size", "tp_size", "pp_size")
SIZES = (*MESH, "ep_size", "cp_size")
NUM_PROCESSES = (1, 2, 4)


def shrink_strategy(
    spec: Any, strategy: Any, processes: int | None, notes: list[str]
) -> tuple[Any, int]:
    """Returns the small configuration of a strategy and its number of processes.

    Args:
        spec: The strategy's configuration: its name, or class_path and init_args.
        strategy: The strategy, instantiated, or its name.
        processes: Number of processes; None: the minimum.
        notes: A sentence for each difference from production is appended.

    Raises:
        InputError: `processes` does not fit.
    """
    spec = copy.deepcopy(spec)
    options = spec.get("init_args") or {} if isinstance(spec, dict) else {}
    if "process_group_backend" in options:
        options["process_group_backend"] = None  # the default of a CPU
    if isinstance(options.get("config"), str | dict):
        options["config"] = _shrink_deepspeed(options["config"])
    elif "param_persistence_threshold" in options:
        options["param_persistence_threshold"] = PERSISTENT
    for name in ("offload_optimizer_device", "offload_params_device"):
        if options.get(name) == "nvme":
            options[name] = "cpu"
            notes.append(f"{name} is host memory here, not NVMe")
    if hasattr(strategy, "sizes"):
        num = _shrink_mesh(options, strategy, processes, notes)
        if num_stages(options) > 1:
            options["pp_stages_per_rank"] = min(options["pp_stages_per_rank"], 2)
            if isinstance(options["pp_layers"], list):
                options["pp_layers"] = "even"
                notes.append("pp_layers is even: the small model has fewer blocks")
        return spec, num
    return ("ddp" if spec == "auto" else spec), processes or 2


def _shrink_mesh(options: Any, strategy: Any, processes: int | None, notes: list[str]) -> int:
    """Sets the smallest sizes that keep each kind of parallelism; returns the number of ranks.

    Three kinds would need 8 processes: replication is then dropped, in a pipeline FSDP first.
    """
    given = {name: options[name] for name in SIZES}
    choices = {name: [2 if size not in (1, "auto") else size] for name, size in given.items()}
    if choices["fsdp_size"] == [2]:
        choices["fsdp_size"].append(4)
    may_drop = ["dp_replicate_size"] + ["fsdp_size"] * (given["pp_size"] != 1)
    for name in may_drop:
        choices[name] += [1] * (given[name] != 1)
    for sizes in itertools.product(*choices.values()):
        options |= zip(choices, sizes, strict=True)
        for num in (processes,) if processes else NUM_PROCESSES:
            if _keeps_parallelism(given, options, strategy, num):
                for name in may_drop:
                    if options[name] == 1 != given[name]:
                        notes.append(f"{name} is 1: the mesh would need 8 processes")
                return num
    options |= {name: sizes[0] for name, sizes in choices.items()}
    num = processes or NUM_PROCESSES[-1]
    with_sizes(strategy, options).sizes(num)  # raises if the number does not fit
    return num


def _keeps_parallelism(given: Any, options: Any, strategy: Any, num: int) -> bool:
    """Returns whether the sizes fit, each `auto` is above 1, and experts stay sharded by FSDP."""
    try:
        small = with_sizes(strategy, options).sizes(num)
    except InputError:
        return False
    if any(options[name] == "auto" and size == 1 for name, size in _resolved(small).items()):
        return False
    fsdp, tp, ep = (given[name] for name in ("fsdp_size", "tp_size", "ep_size"))
    if small.pp > 1:  # experts that FSDP shards too would need 8 processes
        return ep == 1 or 1 < small.ep <= small.fsdp * small.tp
    shards_experts = ep not in (1, "auto") and ("auto" in (fsdp, tp) or fsdp * tp > ep)
    return not shards_experts or small.fsdp * small.tp > small.ep


def _resolved(sizes: Any) -> dict[str, int]:
    return dict(zip(MESH, (sizes.dp_replicate, sizes.fsdp, sizes.tp, sizes.pp), strict=True))


def num_stages(options: Any) -> int:
    """Returns the stages of the pipeline of a MeshStrategy with `options`, of 2 ranks; 1: none."""
    if options.get("pp_size", 1) == 1:
        return 1
    return 2 * stages_per_rank(options["pp_schedule"], min(options["pp_stages_per_rank"], 2))


def halve(spec: Any, strategy: Any, processes: int) -> tuple[Any, int, int]:
    """Halves the processes, data parallelism first.

    Returns the strategy's configuration, the processes, and the data-parallel ranks among them.

    Raises:
        InputError: there is only one process.
    """
    if processes < 2:
        raise InputError("one process cannot be halved; give --processes 2 or more")
    num, spec = processes // 2, copy.deepcopy(spec)
    if hasattr(strategy, "sizes"):
        options = spec["init_args"]
        whole = _resolved(with_sizes(strategy, options).sizes(processes))
        name = next(name for name in MESH if whole[name] > 1)
        if options[name] != "auto":  # auto adapts
            options[name] //= 2
        shared, options["cp_size"] = options["cp_size"], 1
        sizes = with_sizes(strategy, options).sizes(num)
        options["cp_size"] = gcd(shared, sizes.fsdp)
        if options["ep_size"] != "auto":
            options["ep_size"] = min(options["ep_size"], sizes.fsdp * sizes.tp)
        strategy = with_sizes(strategy, options)
    return spec, num, data_parallel_size(strategy, num)


def with_sizes(strategy: Any, options: dict[str, Any]) -> Any:
    """Returns a copy of a MeshStrategy with the sizes in `options`."""
    small = copy.copy(strategy)
    for name in SIZES:
        setattr(small, name, options[name])
    return small


def _shrink_deepspeed(config: Any) -> dict[str, Any]:
    """Returns a user's DeepSpeed JSON without the keys that the Trainer's settings replace."""
    if isinstance(config, str):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    small = copy.deepcopy(config)
    for key in REPLACED:
        small.pop(key, None)
    zero = small.get("zero_optimization", {})
    if "stage3_param_persistence_threshold" in zero:
        zero["stage3_param_persistence_threshold"] = PERSISTENT
    for section in (zero.get("offload_optimizer", {}), zero.get("offload_param", {})):
        if section.get("device") == "nvme":
            section["device"] = "cpu"
    return small
