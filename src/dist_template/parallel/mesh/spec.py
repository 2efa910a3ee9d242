"""MeshStrategy's configuration: what each axis of its mesh refuses, what transformers' plans say of
it, and its memory and messages. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import gcd, prod
from typing import Any, ClassVar, Self

from ...by_tokens import divisor_of, values_of
from ...errors import InputError
from ..configured import ARGS, NOT_READ_YET, Configured
from ..own_code import code_of
from ..spec.base import SLOWER, ReducedStrategy, Spec
from ..spec.facts import STATE, BlockRun, Facts, Saving, Sent
from ..spec.refusals import measured_refusal, selective_refusal
from .estimate import TRAFFIC, Stages, kept_micro_batches
from .pipeline.stages import (
    ONE_STAGE,
    SPLIT_BACKWARD,
    V_SHAPED,
    Layers,
    Schedule,
    StageFacts,
    needed_micro_batches,
    stages_per_rank,
    wrong_layers,
)
from .sizes import AXES, Axis, MeshSizes, Size, data_parallel_size, given_size, sizes_of

MOST = 4  # processes of a rehearsal
QUERIES = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")  # whose columns are heads
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


@dataclass(frozen=True)
class MeshSpec(Spec):
    """Shards a model over a mesh of ranks; `arguments` has the sizes, by `Axis.key`."""

    name: str = "MeshStrategy"
    pp_schedule: Schedule = "1F1B"
    pp_stages_per_rank: int = 2
    pp_layers: Layers = "cost"
    tp_plan: dict[str, str] | None = None
    ep_plan: dict[str, str] | None = None
    cpu_offload: bool = False
    reduce_each_micro_batch: bool = True

    precisions: ClassVar[tuple[str, ...]] = ("32-true", "bf16-mixed", "bf16-true", "16-true")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Returns the spec of MeshStrategy's arguments."""
        _, _, _, *options = fields(cls)  # arguments, name, bases
        return cls(
            arguments, **{each.name: arguments.get(each.name, each.default) for each in options}
        )

    @staticmethod
    def strategy_class() -> type:
        from .strategy import MeshStrategy

        return MeshStrategy

    @staticmethod
    def format_class() -> type:
        from .format import ShardedFormat

        return ShardedFormat

    # ---- ranks -----------------------------------------------------------------------------------

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

    def reduced(self, processes: int | None = None) -> ReducedStrategy:
        """Reduces sizes above 1 to 2. If that needs too many processes, data parallelism becomes 1
        first, and then others."""
        arguments, stages, notes = dict(self.arguments), 1, []
        adding = [axis for axis in AXES if axis.adds_ranks]
        sizes: dict[str, Size] = {}
        for axis in adding:
            sizes[axis.key] = given_size(arguments, axis)
            if sizes[axis.key] not in (1, "auto"):
                sizes[axis.key] = 2
        for axis in sorted(
            reversed(adding), key=lambda axis: (not axis.reads_own_rows, axis.name == "fsdp")
        ):
            key = axis.key
            if _ranks(sizes) > (processes or MOST) and sizes[key] != 1:
                sizes[key] = 1
                notes.append(f"{key} is 1: the mesh would need more processes")
        num = processes or _ranks(sizes)
        arguments |= sizes | {"ep_size": 1, "cp_size": 1}
        resolved = sizes_of(arguments, num)  # raises if the number does not fit
        ranks, given = resolved.fsdp * resolved.tp, self.arguments.get("ep_size", 1)
        arguments["ep_size"] = given if given == "auto" else min(given, 2, ranks)
        arguments["cp_size"] = gcd(self.arguments.get("cp_size", 1), resolved.fsdp)
        if resolved.pp > 1:
            arguments["pp_stages_per_rank"] = min(self.pp_stages_per_rank, 2)
            stages = 2 * stages_per_rank(self.pp_schedule, arguments["pp_stages_per_rank"])
            if isinstance(self.pp_layers, list):
                arguments["pp_layers"] = "even"
                notes.append("pp_layers is even: the small model has fewer blocks")
        return ReducedStrategy(
            arguments, num, data_parallel_size(sizes_of(arguments, num)), stages, notes
        )

    # ---- refusals --------------------------------------------------------------------------------

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

    def stage_facts(self, model: Any, world_size: int) -> StageFacts | None:
        if (pp := self.sizes(world_size).pp) == 1:
            return None
        from .pipeline.partition import facts_of

        return facts_of(model, pp, self.pp_schedule, self.pp_stages_per_rank, self.pp_layers)

    def stages(self, facts: Facts) -> Stages:
        """Returns the stages that a run recorded, or `plan` made; one stage if none."""
        if not facts.pipeline or self.sizes(facts.world_size).pp == 1:
            return Stages(blocks=facts.layers)
        stages, m = facts.pipeline["stages"], self.accumulation(facts)
        p, v = len(stages), len(stages[0])
        sizes, blocks = [], []  # of each rank
        for own in stages:
            sizes.append(sum(map(facts.pipeline["parameters"].__getitem__, own)))
            blocks.append(sum(map(facts.pipeline["blocks"].__getitem__, own)))
        last = next(rank for rank, own in enumerate(stages) if p * v - 1 in own)
        blocks[last] += facts.predicted  # after the last stage's
        schedule = facts.pipeline["schedule"]
        most, at_end = kept_micro_batches(schedule, p, v, m)
        return Stages(
            largest=max(sizes) / facts.parameters,
            mean=sum(sizes) / facts.parameters / p,
            blocks=max(blocks),
            kept=min(most, m),
            kept_at_end=min(at_end, m),
            crossings=2 * (p - 1) if schedule in V_SHAPED else v * p - 1,
        )

    # ---- memory ----------------------------------------------------------------------------------

    def share(self, facts: Facts) -> float:
        sizes = self.sizes(facts.world_size)
        replicated = 1 + facts.tp_replicates / facts.parameters * (sizes.tp - 1)
        others = prod(axis.share(facts) for axis in self.active(facts.world_size))
        return others * self.stages(facts).largest * replicated / sizes.tp / sizes.fsdp

    def mean_share(self, facts: Facts) -> float:
        """Returns the mean over ranks of the share of the parameters that a rank stores."""
        stages = self.stages(facts)
        return self.share(facts) * stages.mean / stages.largest

    def tokens(self, facts: Facts) -> int:
        return super().tokens(facts) // self.sizes(facts.world_size).cp

    def block_run(self, facts: Facts) -> BlockRun:
        sizes = self.sizes(facts.world_size)
        is_half = facts.is_half and (sizes.fsdp > 1 or facts.stores_half)
        return BlockRun(is_half, facts.is_mixed, sizes.tp)

    def block(self, facts: Facts) -> float:
        """Returns the parameters of the largest block, gathered by FSDP2: other ranks' experts of
        expert parallelism are not."""
        sizes, experts = self.sizes(facts.world_size), facts.block_experts
        largest = facts.block or (facts.parameters - facts.embedding) / facts.layers
        if sizes.ep > 1:
            return (largest - experts) / sizes.tp + experts / sizes.ep
        return largest / sizes.tp

    def state(self, facts: Facts) -> dict[str, float]:
        offloaded = self.cpu_offload and not facts.on_host
        return super().state(facts) | dict.fromkeys(STATE * offloaded, 0.0)

    def buffers(self, facts: Facts) -> dict[str, float]:
        """FSDP2 gathers the running block, the next one, and the embedding or the head; a pipeline
        is ZeRO-1 inside of a stage, whose weights are gathered once per step."""
        sizes, width, used = (
            self.sizes(facts.world_size),
            self.weight_bytes(facts),
            self.used_bytes(facts),
        )
        parts: dict[str, float] = {}
        for axis in self.active(facts.world_size):
            parts |= axis.buffers(facts)
        if sizes.pp > 1 and sizes.dp_replicate * sizes.fsdp > 1:
            experts = facts.experts if sizes.ep > 1 else 0
            gathered = (facts.parameters - experts) / sizes.tp + experts / sizes.ep
            gathered *= self.stages(facts).largest
            parts["gathered weights"] = gathered * used
            parts["unsharded gradients"] = gathered * facts.trainable / facts.parameters * width
        elif sizes.pp == 1 and sizes.fsdp > 1:
            parts["gathered weights"] = (
                2 * self.block(facts) + facts.vocab_size * facts.width / sizes.tp
            ) * used
            if not self.reduce_each_micro_batch and self.accumulation(facts) > 1:
                parts["unsharded gradients"] = facts.trainable / sizes.tp * width
        return parts

    def memory(self, facts: Facts) -> dict[str, float]:
        """With traced activations, adds the block whose gradients are being reduced; the rank of
        the last stage, which alone has logits, keeps fewer micro-batches than others."""
        parts, sizes = super().memory(facts), self.sizes(facts.world_size)
        if facts.traced is not None and sizes.pp > 1:
            stages = self.stages(facts)
            parts["activations"] *= self.layers_kept(facts) / facts.layers
            fewer = parts["activations"] * (1 - stages.kept_at_end / stages.kept)
            parts["logits"] = max(0.0, parts["logits"] - fewer)
        elif facts.traced is not None and sizes.fsdp > 1:
            width = self.used_bytes(facts) + self.weight_bytes(facts)
            parts["backward"] += self.block(facts) * width
        return parts

    def layers_kept(self, facts: Facts) -> float:
        stages = self.stages(facts)
        return stages.kept * stages.blocks

    def savings(self, facts: Facts) -> Iterator[Saving]:
        if not self.reduce_each_micro_batch:
            key = f"{ARGS}.reduce_each_micro_batch"
            sentence = (
                "Gradients reduced in every micro-batch: more communication, same loss curve."
            )
            yield Saving(sentence, {key: (False, True)})
        if self.sizes(facts.world_size).fsdp > 1 and not self.cpu_offload:
            sentence = f"Parameters, gradients and optimizer state in host memory: {SLOWER}"
            yield Saving(sentence, {f"{ARGS}.cpu_offload": (False, True)}, is_on_host=True)

    # ---- messages and time -----------------------------------------------------------------------

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        for axis in self.active(facts.world_size):
            if axis.name in TRAFFIC:
                yield from TRAFFIC[axis.name](self, axis.sizes, facts)
            else:
                yield from axis.traffic(facts)

    def allows(self, facts: Facts) -> bool:
        """Returns whether `fit` accepts it and the formulas apply: a schedule that splits the
        backward pass recomputes a block twice, and ZBVZeroBubble waits longer with few
        micro-batches."""
        sizes, m = self.sizes(facts.world_size), self.accumulation(facts)
        if facts.checkpointing == "selective" and sizes.ep > 1:
            return False
        if sizes.pp == 1:
            return True
        least, multiple = needed_micro_batches(self.pp_schedule, sizes.pp)
        least = max(least, sizes.pp)
        if self.pp_schedule in SPLIT_BACKWARD and facts.checkpointing != "none":
            return False
        if self.pp_schedule == "ZBVZeroBubble":
            least = (3 * sizes.pp + 1) // 2
        return m >= least and m % multiple == 0

    def slowdown(self, facts: Facts) -> float:
        stages, pp = self.stages(facts), self.sizes(facts.world_size).pp
        waits = facts.pipeline["bubble"] / self.accumulation(facts) if facts.pipeline else 0.0
        return (1 + waits) * stages.blocks * pp / facts.layers

    def on_host(self, facts: Facts) -> tuple[float, float]:
        share = self.share(facts) * self.cpu_offload
        return facts.trainable * share, facts.parameters * share


def _pipeline(mesh: MeshSpec, sizes: MeshSizes, setup: Configured) -> Iterator[str]:
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


def _tensor(mesh: MeshSpec, sizes: MeshSizes, setup: Configured) -> Iterator[str]:
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


def _expert(mesh: MeshSpec, sizes: MeshSizes, setup: Configured) -> Iterator[str]:
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


def _sequence(mesh: MeshSpec, sizes: MeshSizes, setup: Configured) -> Iterator[str]:
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


REFUSALS: dict[str, Callable[[MeshSpec, MeshSizes, Configured], Iterator[str]]] = {
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


def _ranks(sizes: dict[str, Size]) -> int:
    return prod(2 if size == "auto" else size for size in sizes.values())
