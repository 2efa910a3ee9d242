"""MeshStrategy: its sizes, the machine's, and the model's plans, heads and experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import InputError
from ...model.any_module import typed_attribute
from ...model.balance import BalanceConfig
from ...parallel.mesh import MeshStrategy
from .machine import ARGS, NOT_READ_YET, Setup

QUERIES = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")  # whose columns are heads
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


def sizes(setup: Setup) -> Iterator[str]:
    if not isinstance(strategy := setup.strategy, MeshStrategy):
        return
    for name in ("pp_size", "dp_replicate_size", "fsdp_size", "tp_size", "ep_size"):
        if (size := getattr(strategy, name)) != "auto" and size < 1:
            yield f"{ARGS}.{name} {size} is not a number of processes: set 1 or more, or auto"
            return
    try:
        mesh = strategy.sizes(setup.machine.world_size)
    except InputError as error:
        yield str(error)
        return
    if mesh.ep > 1 and (mesh.ep % mesh.tp or mesh.fsdp * mesh.tp % mesh.ep):
        yield (
            f"ep_size {mesh.ep} must be a multiple of tp_size {mesh.tp} and divide fsdp_size"
            f" {mesh.fsdp} x tp_size {mesh.tp} = {mesh.fsdp * mesh.tp}; edit {ARGS}.ep_size"
        )
    if strategy.cpu_offload and mesh.data_parallel == 1 and mesh.tp > 1:
        yield (
            f"{ARGS}.cpu_offload true needs parameters that FSDP shards, but fsdp_size x"
            " dp_replicate_size is 1: set it to false, or fsdp_size to 2 or more"
        )


def plans(setup: Setup) -> Iterator[str]:
    """Tensor and expert parallelism need a plan that says how each module is sharded."""
    config, mesh = setup.model_config, setup.mesh
    if config is NOT_READ_YET or mesh is None:
        return
    for kind, size, what in (("tp", mesh.tp, "tensor"), ("ep", mesh.ep, "expert")):
        if size == 1 or _plan(setup, kind):
            continue
        if config is None:
            yield (
                f"{kind}_size {size} needs a model of transformers, which has a plan for {what}"
                f" parallelism: set {ARGS}.{kind}_size to 1, or return the model's configuration"
                " from build_config in module.py"
            )
        else:
            yield (
                f"{kind}_size {size}: a model of type {config.model_type!r} has no plan for {what}"
                f" parallelism; set {ARGS}.{kind}_size to 1, or give rules as {ARGS}.{kind}_plan"
            )


def heads(setup: Setup) -> Iterator[str]:
    config, mesh = setup.model_config, setup.mesh
    if config in (NOT_READ_YET, None) or mesh is None or mesh.tp == 1:
        return
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    plan, text = _plan(setup, "tp"), config.get_text_config()
    queries = getattr(text, "num_attention_heads", None)
    keys = getattr(text, "num_key_value_heads", None) or queries
    if _shards_heads(plan) and isinstance(queries, int) and queries % mesh.tp:
        broken = f"num_attention_heads {queries}"
    elif keys is not None and get_kv_heads_per_rank(plan, keys, mesh.tp) is None:
        broken = f"num_key_value_heads {keys}"
    else:
        return
    yield (
        f"the model's {broken} is not a multiple of tp_size {mesh.tp}, and no head is split: edit"
        f" {ARGS}.tp_size, or model.architecture"
    )


def experts(setup: Setup) -> Iterator[str]:
    config, mesh = setup.model_config, setup.mesh
    if config in (NOT_READ_YET, None) or mesh is None or not _plan(setup, "ep"):
        return
    name, number = experts_of(config.get_text_config())
    if number % mesh.ep:
        yield (
            f"the model's {name} {number} is not a multiple of ep_size {mesh.ep}, and no expert is"
            f" split: edit {ARGS}.ep_size, or model.architecture"
        )


def sequences(setup: Setup) -> Iterator[str]:
    """Ranks that share sequences divide tokens and heads; some losses need full sequences."""
    config, mesh, key = setup.model_config, setup.mesh, f"{ARGS}.cp_size"
    if mesh is None or mesh.cp == 1:
        return
    if config is None:
        yield f"cp_size {mesh.cp} needs a model of transformers: set {key} to 1"
    if (seq_len := getattr(setup.data, "seq_len", 0)) % mesh.cp:
        yield f"data.seq_len {seq_len} is not a multiple of cp_size {mesh.cp}: edit one of them"
    if getattr(getattr(setup.data, "source", None), "pairs", False):
        yield f"cp_size {mesh.cp} would split pairs of data.source Preferences: set {key} to 1"
    if getattr(typed_attribute(setup.module, "balance", BalanceConfig), "sequence_loss_coef", 0):
        yield f"model.balance.sequence_loss_coef needs full sequences: set it to 0, or {key} to 1"
    if config in (NOT_READ_YET, None):
        return
    heads, whose = getattr(config.get_text_config(), "num_attention_heads", 0), "the model's"
    if mesh.tp > 1 and _shards_heads(_plan(setup, "tp")):
        heads, whose = heads // mesh.tp, f"a rank's (tp_size {mesh.tp})"
    if heads % mesh.cp:
        yield f"cp_size {mesh.cp} does not divide {whose} {heads} attention heads: edit {key}"


def optimizer(setup: Setup) -> Iterator[str]:
    chosen = getattr(setup.optim, "optimizer", None) or {}
    if setup.mesh is not None and chosen.get("class_path") == "torch.optim.Adafactor":
        # torch 2.13: "in-place operations that require placement changes are not supported"
        yield (
            "--optimizer Adafactor: torch's fails on sharded matrices, whose rows it reads: use"
            " configs/strategy/ddp.yaml, or another optimizer"
        )


def experts_of(config: Any) -> tuple[str, int]:
    """Returns the field with the number of experts, and the number; 0 if there are none."""
    for name in EXPERTS:
        if isinstance(number := getattr(config, name, None), int):
            return name, number
    return EXPERTS[0], 0


def _shards_heads(plan: dict[str, str]) -> bool:
    return any(rule.endswith(QUERIES) and style == "colwise" for rule, style in plan.items())


def _plan(setup: Setup, kind: str) -> dict[str, str]:
    """Returns the model's rules, overridden by the user's; {} as tp_plan means none."""
    config, given = setup.model_config, getattr(setup.strategy, f"{kind}_plan")
    if config is None or (kind == "tp" and given == {}):
        return {}
    own: Any = getattr(config, f"base_model_{kind}_plan", None)
    own = own or getattr(config.get_text_config(), f"base_model_{kind}_plan", None)
    return {**(own or {}), **(given or {})}
