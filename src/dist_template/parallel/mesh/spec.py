"""MeshStrategy's configuration: what each axis of its mesh refuses, and what transformers' plans
say of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from ...by_tokens import divisor_of, values_of
from ...errors import InputError
from ..configured import ARGS, NOT_READ_YET, Configured
from ..own_code import code_of
from ..spec.plain import Plain, measured_refusal, selective_refusal
from .pipeline.stages import (
    ONE_STAGE,
    SPLIT_BACKWARD,
    Layers,
    Schedule,
    needed_micro_batches,
    stages_per_rank,
    wrong_layers,
)
from .sizes import AXES, Axis, MeshSizes, data_parallel_size, sizes_of

QUERIES = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")  # whose columns are heads
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


@dataclass(frozen=True)
class Mesh(Plain):
    """Shards a model over a mesh of ranks; `arguments` has the sizes, by `Axis.key`."""

    name: str = "MeshStrategy"
    pp_schedule: Schedule = "1F1B"
    pp_stages_per_rank: int = 2
    pp_layers: Layers = "cost"
    tp_plan: dict[str, str] | None = None
    ep_plan: dict[str, str] | None = None
    cpu_offload: bool = False
    reduce_each_micro_batch: bool = True

    is_replicated: ClassVar[bool] = False
    precisions: ClassVar[tuple[str, ...]] = ("32-true", "bf16-mixed", "bf16-true", "16-true")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Returns the sharding of MeshStrategy's arguments."""
        _, _, _, *options = fields(cls)  # arguments, name, bases
        return cls(
            arguments, **{each.name: arguments.get(each.name, each.default) for each in options}
        )

    def sizes(self, world_size: int) -> MeshSizes:
        """Returns the sizes on `world_size` ranks. Raises InputError if they do not fit."""
        return sizes_of(self.arguments, world_size)

    def active(self, world_size: int) -> list[Axis]:
        """Returns the axes that have a size above 1."""
        sizes = self.sizes(world_size)
        return [axis(sizes) for axis in AXES if sizes[axis.name] > 1]

    def data_parallel(self, world_size: int) -> int:
        return data_parallel_size(self.sizes(world_size))

    def rows_together(self, world_size: int, micro_batch_size: int) -> int:
        """A pipeline needs several micro-batches in a step."""
        least, _ = needed_micro_batches(self.pp_schedule, self.sizes(world_size).pp)
        return least * super().rows_together(world_size, micro_batch_size)

    def expert_parts(self, world_size: int) -> int:
        """Tensor parallelism divides each expert, unless expert parallelism distributes them."""
        sizes = self.sizes(world_size)
        return sizes.tp if sizes.ep == 1 else 1

    def axes(self, world_size: int) -> list[str]:
        found = [axis.name for axis in self.active(world_size) if axis.is_proven]
        if "pp" in found:  # proof.json has it after the others
            found.append(found.pop(0))
        return found or super().axes(world_size)

    def refusals(self, setup: Configured) -> Iterator[str]:
        yield from super().refusals(setup)
        code = code_of(type(setup.module))
        if setup.trains and code is not None and "grad_norm" in code.calls:
            yield (
                f"{type(setup.module).__name__} calls grad_norm, and Lightning's (2.6.6) cannot"
                f" read the sharded gradients of {self.name}: remove the call; the norm is logged"
                " as train/grad_norm anyway"
            )
        world_size = setup.machine.world_size
        try:
            sizes = self.sizes(world_size)
        except InputError as error:
            yield str(error)
            return
        if self.cpu_offload and sizes.tp > 1 and self.data_parallel(world_size) == 1:
            why = "needs parameters that FSDP shards, but fsdp_size x dp_replicate_size is 1"
            yield f"{ARGS}.cpu_offload true {why}: set it to false, or fsdp_size to 2 or more"
        # A model's plans come first, then its stages.
        for axis in sorted(self.active(world_size), key=lambda axis: axis.name == "pp"):
            if axis.name in REFUSALS:
                yield from REFUSALS[axis.name](self, sizes, setup)
            else:
                yield from axis.refusals(setup)


def _pipeline(mesh: Mesh, sizes: MeshSizes, setup: Configured) -> Iterator[str]:
    """Blocks and micro-batches for every stage, and one pass of the model in a step."""
    schedule = mesh.pp_schedule
    per_rank = stages_per_rank(schedule, mesh.pp_stages_per_rank)
    stages = sizes.pp * per_rank
    if schedule not in ONE_STAGE and per_rank < 2:
        yield (
            f"{ARGS}.pp_stages_per_rank {per_rank}: {schedule} needs 2 or more; edit it, or set"
            " pp_schedule 1F1B"
        )
    config, num = setup.text_config, None
    if not hasattr(config, "decoder_layers"):  # else num_hidden_layers is the encoder's
        num = getattr(config, "num_hidden_layers", None)
    if num is not None and num < stages:
        way_out = f"lower {ARGS}.pp_size, or set another pp_schedule"
        yield f"the model's {num} blocks cannot be divided into {stages} stages: {way_out}"
    elif isinstance(mesh.pp_layers, list) and (why := wrong_layers(mesh.pp_layers, stages, num)):
        yield f"{ARGS}.{why}"
    if schedule in SPLIT_BACKWARD:
        for key, value, instead in (
            ("blocks.compile", True, "false"),
            ("blocks.checkpointing", "selective", "full or none"),
        ):
            if setup.setting(key) == value:
                yield (
                    f"model.{key} {str(value).lower()} does not work with pp_schedule {schedule},"
                    " which computes gradients of inputs and of weights in two passes: set it to"
                    f" {instead}, or {ARGS}.pp_schedule to 1F1B or Interleaved1F1B"
                )
    rows, micro = (getattr(setup.data, f"{name}_batch_size", None) for name in ("global", "micro"))
    if setup.trains and rows and micro:
        together = micro * mesh.data_parallel(setup.machine.world_size)
        least, multiple = needed_micro_batches(schedule, sizes.pp)
        batches, needs = int(min(values_of(rows))) // together, ""
        if multiple > 1 and (of_all := divisor_of(rows) // together) % multiple:
            batches, needs = of_all, f"a multiple of {multiple}"
        elif batches < least:
            needs = f"{least} or more, one for each stage"
        if needs:
            yield (
                f"an optimizer step has {batches} micro-batches (global_batch_size /"
                f" micro_batch_size / data-parallel ranks), and {schedule} needs {needs}:"
                f" edit data.micro_batch_size, data.global_batch_size or {ARGS}.pp_schedule"
            )
    if getattr(setup.data, "rank_speeds", None):
        why = "does not work in a pipeline, whose micro-batches have one shape"
        yield f"data.rank_speeds {why}: remove it, or set {ARGS}.pp_size to 1"
    if mesh.cpu_offload:
        yield f"{ARGS}.cpu_offload true does not work in a pipeline: set it to false"
    if setup.setting("adapter.quantize"):
        yield "model.adapter.quantize does not work in a pipeline: set it to null, or pp_size to 1"
    if setup.several_passes:
        yield f"{setup.several_passes} does not work in a pipeline: set {ARGS}.pp_size to 1"


def _tensor(mesh: Mesh, sizes: MeshSizes, setup: Configured) -> Iterator[str]:
    """A plan, and heads that it does not split."""
    size, config = sizes.tp, setup.text_config
    plan = plan_of(setup, "tp", mesh.tp_plan)
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    broken = ""
    if not plan:
        yield from without_plan(setup, "tp", size, "tensor")
    elif shards_heads(plan) and isinstance(queries, int) and queries % size:
        broken = f"num_attention_heads {queries}"
    elif keys is not None:
        from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

        if get_kv_heads_per_rank(plan, keys, size) is None:
            broken = f"num_key_value_heads {keys}"
    if broken:
        way_out = f"edit {ARGS}.tp_size, or model.architecture"
        yield (
            f"the model's {broken} is not a multiple of tp_size {size}, and no head is split:"
            f" {way_out}"
        )
    for key in ("quantize", "dora"):
        if setup.setting(f"adapter.{key}"):
            way_out = f"unset it, or set {ARGS}.tp_size {size} to 1"
            yield f"model.adapter.{key} does not work with tensor parallelism: {way_out}"


def _expert(mesh: Mesh, sizes: MeshSizes, setup: Configured) -> Iterator[str]:
    """A plan, and a size that divides ranks and experts."""
    size, fsdp, tp = sizes.ep, sizes.fsdp, sizes.tp
    if size % tp or fsdp * tp % size:
        product = f"fsdp_size {fsdp} x tp_size {tp} = {fsdp * tp}"
        yield (
            f"ep_size {size} must be a multiple of tp_size {tp} and divide {product}; edit"
            f" {ARGS}.ep_size"
        )
    if not plan_of(setup, "ep", mesh.ep_plan):
        yield from without_plan(setup, "ep", size, "expert")
    else:
        name, number = experts_of(setup.text_config)
        if number % size:
            why = f"is not a multiple of ep_size {size}, and no expert is split"
            yield f"the model's {name} {number} {why}: edit {ARGS}.ep_size, or model.architecture"
    yield from selective_refusal(setup, "ep_size > 1")
    yield from measured_refusal(setup, "ep_size > 1")


def _sequence(mesh: Mesh, sizes: MeshSizes, setup: Configured) -> Iterator[str]:
    """Ranks that share sequences divide tokens and heads."""
    size, tp, key = sizes.cp, sizes.tp, f"{ARGS}.cp_size"
    if setup.model_config is None:
        yield f"cp_size {size} needs a model of transformers: set {key} to 1"
    if (seq_len := getattr(setup.data, "seq_len", 0)) % size:
        yield f"data.seq_len {seq_len} is not a multiple of cp_size {size}: edit one of them"
    if getattr(getattr(setup.data, "source", None), "pairs", False):
        yield f"cp_size {size} would split pairs of data.source Preferences: set {key} to 1"
    heads, whose = getattr(setup.text_config, "num_attention_heads", 0), "the model's"
    if tp > 1 and shards_heads(plan_of(setup, "tp", mesh.tp_plan)):
        heads, whose = heads // tp, f"a rank's (tp_size {tp})"
    if heads % size:
        yield f"cp_size {size} does not divide {whose} {heads} attention heads: edit {key}"


REFUSALS: dict[str, Callable[[Mesh, MeshSizes, Configured], Iterator[str]]] = {
    "pp": _pipeline,
    "tp": _tensor,
    "ep": _expert,
    "cp": _sequence,
}


def experts_of(config: object) -> tuple[str, int]:
    """Returns the field with the number of experts, and the number; 0 if there are none."""
    for name in EXPERTS:
        if isinstance(number := getattr(config, name, None), int):
            return name, number
    return EXPERTS[0], 0


def shards_heads(plan: Mapping[str, str]) -> bool:
    return any(rule.endswith(QUERIES) and style == "colwise" for rule, style in plan.items())


def plan_of(setup: Configured, kind: str, given: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the model's rules, overridden by the user's; {} as tp_plan means none."""
    if setup.text_config is None or (kind == "tp" and given == {}):
        return {}
    name = f"base_model_{kind}_plan"
    rules = getattr(setup.model_config, name, None) or getattr(setup.text_config, name, None)
    return {**(rules or {}), **(given or {})}


def without_plan(setup: Configured, kind: str, size: int, what: str) -> Iterator[str]:
    """Tensor and expert parallelism need a plan that says how each module is sharded."""
    if setup.model_config is not NOT_READ_YET:
        of_type = getattr(setup.model_config, "model_type", "another library")
        no_plan = f"a model of {of_type} has no plan for {what} parallelism"
        yield (
            f"{kind}_size {size}: {no_plan}; set {ARGS}.{kind}_size to 1, or give rules as"
            f" {ARGS}.{kind}_plan"
        )
