"""The axes of MeshStrategy's mesh, outermost first, and what transformers' plans say of them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import TYPE_CHECKING

from ..errors import InputError
from .facts import ARGS, NOT_READ_YET, Configured, Facts, Sent
from .mesh_sharding import AXES, Axis, Mesh, MeshSizes, Size
from .pipeline.costs import bubble, stages_per_rank
from .plain import selective_refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUERIES = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")  # whose columns are heads
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


class PipelineAxis(Axis):
    """Each rank has some consecutive blocks."""

    name = "pp"
    has_trial = True

    def share(self, facts: Facts) -> float:
        return self.mesh.stages(facts).largest

    def buffers(self, facts: Facts) -> dict[str, float]:
        """Inside a stage it is ZeRO-1: weights are gathered once per step."""
        mesh, sizes = self.mesh, self.sizes
        if sizes.dp_replicate * sizes.fsdp == 1:
            return {}
        experts = facts.experts if sizes.ep > 1 else 0
        gathered = (facts.parameters - experts) / sizes.tp + experts / sizes.ep
        gathered *= mesh.stages(facts).largest
        trained = gathered * facts.trainable / facts.parameters
        return {
            "gathered weights": gathered * mesh.used_bytes(facts),
            "unsharded gradients": trained * mesh.weight_bytes(facts),
        }

    def refusals(self, setup: Configured) -> Iterator[str]:
        mesh, schedule = self.mesh, self.mesh.pp_schedule
        per_rank = stages_per_rank(schedule, mesh.pp_stages_per_rank)
        if per_rank < 1 or (schedule.startswith("Interleaved") and per_rank < 2):
            yield f"{ARGS}.pp_stages_per_rank {per_rank}: {schedule} needs 2 or more"
            return
        stages, layers = self.size * per_rank, mesh.pp_layers
        num = getattr(setup.text_config, "num_hidden_layers", None)
        if isinstance(layers, list):
            total = sum(layers) if num is None else num
            if len(layers) != stages or min(layers, default=0) < 1 or sum(layers) != total:
                of = "" if num is None else f" that sum to {num}"
                yield f"{ARGS}.pp_layers {layers}: give {stages} numbers{of}, or cost, or even"
        elif num is not None and num < stages:
            yield (
                f"the model's {num} blocks cannot be divided into {stages} stages: lower"
                f" {ARGS}.pp_size, or set another pp_schedule"
            )
        if setup.trains:
            yield from self._micro_batches(setup, stages)
        if mesh.cpu_offload:
            yield f"{ARGS}.cpu_offload true does not work in a pipeline: set it to false"
        if setup.setting("adapter.quantize"):
            null = "set it to null, or pp_size to 1"
            yield f"model.adapter.quantize does not work in a pipeline: {null}"
        if type(getattr(setup.data, "source", None)).__name__ == "Preferences":
            yield (
                "data.source Preferences runs the model twice in a step, which a pipeline cannot"
                f" do: set {ARGS}.pp_size to 1"
            )

    def _micro_batches(self, setup: Configured, stages: int) -> Iterator[str]:
        rows = getattr(setup.data, "global_batch_size", None)
        micro = getattr(setup.data, "micro_batch_size", None)
        if not rows or not micro:
            return
        num = rows // (micro * self.mesh.data_parallel(setup.machine.world_size))
        name, size = self.mesh.pp_schedule, self.size
        least = stages if name in ("1F1B", "DualPipeV") else 1
        needs, fits = f"{least} or more, one for each stage", least
        if name.startswith("Interleaved") and num % max(1, num // size):
            needs, fits = f"a multiple of {size}", num - num % size
        elif num >= least:
            return
        share = bubble(name, stages, stages // size, fits)
        yield (
            f"an optimizer step has {num} micro-batches (global_batch_size / micro_batch_size / data-parallel ranks),"
            f" and {name} needs {needs} (with {fits}, a rank waits {share:.0%} of the time in which it computes): edit"
            f" data.micro_batch_size, data.global_batch_size or {ARGS}.pp_schedule"
        )

    def trial(self, model: PreTrainedModel) -> None:
        from .pipeline.division import try_stages

        try_stages(model, self.mesh.facts_of(model, self.size))

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Hidden states and their gradients; the gradients of the two copies of a tied weight."""
        mesh, p = self.mesh, self.size
        stages, span = mesh.stages(facts), facts.world_size // p + 1
        calls = 2 * stages.crossings * mesh.accumulation(facts) / p
        elements = calls * mesh.tokens(facts) * facts.width
        yield Sent("send", elements, mesh.used_bytes(facts), 2, calls, span)
        tied = (stages.mean * p - 1) * facts.parameters
        if tied > 1 / 2:
            elements = 2 / p * tied / self.sizes.fsdp / self.sizes.tp
            yield Sent("all_reduce", elements, 4, 2, 2 / p, span)


class ReplicaAxis(Axis):
    """HSDP: replicas of what fsdp shards."""

    name = "dp_replicate"
    reads_own_rows, is_proven = True, False

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Gradients of a rank's shard, once per step."""
        own, width = self.mesh.mean_share(facts) * facts.trainable, self.mesh.weight_bytes(facts)
        pp = self.sizes.pp
        calls, span = (facts.layers + 2) / pp, facts.world_size // pp
        yield Sent("all_reduce", own, width, self.size, calls, span)

    @classmethod
    def small(cls, given: Size, mesh: Mesh) -> list[Size]:
        """Three kinds of parallelism would need 8 processes: replication is dropped then."""
        return [*super().small(given, mesh), *[1] * (given != 1)]


class ShardAxis(Axis):
    """FSDP2: parameters are gathered where they are used, and gradients reduce-scattered."""

    name, default = "fsdp", "auto"
    reads_own_rows = True

    def share(self, facts: Facts) -> float:
        return 1 / self.size

    def buffers(self, facts: Facts) -> dict[str, float]:
        """The running block, the next one, and the embedding or the head are gathered."""
        mesh, tp = self.mesh, self.sizes.tp
        if self.sizes.pp > 1:
            return {}
        gathered = 2 * mesh.block(facts) + facts.vocab_size * facts.width / tp
        parts = {"gathered weights": gathered * mesh.used_bytes(facts)}
        if not mesh.reduce_each_micro_batch and mesh.accumulation(facts) > 1:
            parts["unsharded gradients"] = facts.trainable / tp * mesh.weight_bytes(facts)
        return parts

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Units are gathered in forward and, but for the norm and the head, again in backward;
        gradients are scattered in each micro-batch or the last. Experts of expert parallelism are
        units of their own, over fewer ranks. In a pipeline both happen once per step."""
        mesh, sizes = self.mesh, self.sizes
        span, m = self.size * sizes.tp, mesh.accumulation(facts)
        experts = facts.experts / sizes.ep / sizes.pp if sizes.ep > 1 else 0.0  # before FSDP
        dense = mesh.mean_share(facts) * facts.parameters * self.size
        dense -= experts * sizes.ep / sizes.tp
        head = facts.vocab_size * facts.width / sizes.tp
        units = [(dense, self.size, (facts.layers + 2) / sizes.pp, head, 1 + facts.is_tied)]
        if experts:
            units.append((experts, span // sizes.ep, facts.moe_layers / sizes.pp, 0.0, 0))
        for elements, ranks, calls, kept, num_kept in units:
            gathered, gathers = m * (2 * elements - kept), m * (2 * calls - num_kept)
            reduces = m if mesh.reduce_each_micro_batch else 1
            if sizes.pp > 1:
                gathered, gathers, reduces = elements, calls, 1
            yield Sent("all_gather", gathered, mesh.used_bytes(facts), ranks, gathers, span)
            scattered = reduces * elements * facts.trainable / facts.parameters
            width = mesh.weight_bytes(facts)
            yield Sent("reduce_scatter", scattered, width, ranks, reduces * calls, span)

    @classmethod
    def small(cls, given: Size, mesh: Mesh) -> list[Size]:
        """4 if experts would not stay sharded; dropped in a pipeline before 8 are needed."""
        sizes = super().small(given, mesh)
        if sizes == [2]:
            sizes.append(4)
        has_stages = mesh.arguments.get("pp_size", 1) != 1
        return [*sizes, *[1] * (has_stages and given != 1)]


class TensorAxis(Axis):
    """Tensor parallelism: ranks share each matrix product, by the model's plan."""

    name = "tp"
    draws_own, has_trial = False, True

    def share(self, facts: Facts) -> float:
        return (1 + facts.tp_replicates / facts.parameters * (self.size - 1)) / self.size

    def refusals(self, setup: Configured) -> Iterator[str]:
        size, config = self.size, setup.text_config
        plan = plan_of(setup, "tp", self.mesh.tp_plan)
        queries = getattr(config, "num_attention_heads", None)
        keys = getattr(config, "num_key_value_heads", None) or queries
        broken = ""
        if not plan:
            yield from without_plan(setup, "tp", size, "tensor")
        elif shards_heads(plan) and isinstance(queries, int) and queries % size:
            broken = f"num_attention_heads {queries}"
        elif keys is not None and not _divides_key_heads(plan, keys, size):
            broken = f"num_key_value_heads {keys}"
        if broken:
            yield (
                f"the model's {broken} is not a multiple of tp_size {size}, and no head is split:"
                f" edit {ARGS}.tp_size, or model.architecture"
            )
        if setup.setting("adapter.quantize"):
            yield (
                "model.adapter.quantize does not work with tensor parallelism: unset it, or set"
                f" {ARGS}.tp_size {size} to 1"
            )

    def trial(self, model: PreTrainedModel) -> None:
        from .shard import complete_plan, refuse_adapters

        refuse_adapters(model)
        complete_plan(model, self.mesh.rules(model, self.sizes), self.size)

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Activations: an output summed in forward, or the gradient of an input in backward. Under
        expert parallelism the ranks, which have the same tokens, each send a part of them: what
        comes back is gathered, and in backward the gradients of hidden states and weights."""
        mesh, size = self.mesh, self.size
        m, width = mesh.accumulation(facts) / self.sizes.pp, mesh.used_bytes(facts)
        tokens, gathered, calls = m * mesh.tokens(facts), facts.vocab_size, 1
        if self.sizes.ep > 1:
            gathered += facts.moe_layers * (2 * facts.width + facts.experts_per_token)
            calls += 3 * facts.moe_layers
        reduced = tokens * facts.tp_widths
        yield Sent("all_reduce", reduced, width, size, m * facts.tp_calls, size, waits=True)
        yield Sent("all_gather", tokens * gathered, width, size, m * calls, size, waits=True)


class ExpertAxis(Axis):
    """Expert parallelism: ranks hold different experts."""

    name = "ep"
    adds_ranks = False

    @classmethod
    def resolved(cls, given: Size, sizes: MeshSizes) -> int:
        return sizes.fsdp * sizes.tp if given == "auto" else given

    def refusals(self, setup: Configured) -> Iterator[str]:
        size, fsdp, tp = self.size, self.sizes.fsdp, self.sizes.tp
        if size % tp or fsdp * tp % size:
            yield (
                f"ep_size {size} must be a multiple of tp_size {tp} and divide fsdp_size {fsdp} x"
                f" tp_size {tp} = {fsdp * tp}; edit {ARGS}.ep_size"
            )
        if not plan_of(setup, "ep", self.mesh.ep_plan):
            yield from without_plan(setup, "ep", size, "expert")
        else:
            name, number = experts_of(setup.text_config)
            if number % size:
                yield (
                    f"the model's {name} {number} is not a multiple of ep_size {size}, and no"
                    f" expert is split: edit {ARGS}.ep_size, or model.architecture"
                )
        yield from selective_refusal(setup, "ep_size > 1")

    @classmethod
    def is_kept(cls, mesh: Mesh, small: MeshSizes) -> bool:
        """Experts stay sharded by FSDP, except in a pipeline, which would need 8 processes."""
        fsdp, tp, ep = (mesh.arguments.get(key, 1) for key in ("fsdp_size", "tp_size", "ep_size"))
        ranks = small.fsdp * small.tp
        if ep == 1:
            return True
        if small.pp > 1:
            return 1 < small.ep <= ranks
        is_sharded = ep != "auto" and ("auto" in (fsdp, tp) or fsdp * tp > ep)
        return not is_sharded or ranks > small.ep

    @classmethod
    def fitted(cls, given: Size, sizes: MeshSizes) -> Size:
        return given if given == "auto" else min(given, sizes.fsdp * sizes.tp)

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Each token to the ranks that hold its experts and back, in forward and in backward."""
        mesh, sizes, size = self.mesh, self.sizes, self.size
        calls = 4 * facts.moe_layers * mesh.accumulation(facts) / sizes.pp
        moved = mesh.tokens(facts) * facts.experts_per_token * facts.width / sizes.tp
        width = mesh.used_bytes(facts)
        yield Sent("all_to_all", calls * moved, width, size, calls, size, waits=True)


class SequenceAxis(Axis):
    """Sequence parallelism: neighbours along fsdp share each sequence."""

    name = "cp"
    adds_ranks, has_trial = False, True

    @classmethod
    def resolved(cls, given: Size, sizes: MeshSizes) -> int:
        if given == "auto" or given < 1 or sizes.fsdp % given:
            raise InputError(f"cp_size {given} must divide fsdp_size {sizes.fsdp}: edit cp_size")
        return given

    @classmethod
    def fitted(cls, given: Size, sizes: MeshSizes) -> Size:
        return given if given == "auto" else gcd(given, sizes.fsdp)

    def refusals(self, setup: Configured) -> Iterator[str]:
        """Ranks that share sequences divide tokens and heads; some losses need full sequences."""
        size, tp, key = self.size, self.sizes.tp, f"{ARGS}.cp_size"
        if setup.model_config is None:
            yield f"cp_size {size} needs a model of transformers: set {key} to 1"
        if (seq_len := getattr(setup.data, "seq_len", 0)) % size:
            yield f"data.seq_len {seq_len} is not a multiple of cp_size {size}: edit one of them"
        if getattr(getattr(setup.data, "source", None), "pairs", False):
            yield f"cp_size {size} would split pairs of data.source Preferences: set {key} to 1"
        if setup.setting("balance.sequence_loss_coef"):
            either = f"set it to 0, or {key} to 1"
            yield f"model.balance.sequence_loss_coef needs full sequences: {either}"
        heads, whose = getattr(setup.text_config, "num_attention_heads", 0), "the model's"
        if tp > 1 and shards_heads(plan_of(setup, "tp", self.mesh.tp_plan)):
            heads, whose = heads // tp, f"a rank's (tp_size {tp})"
        if heads % size:
            yield f"cp_size {size} does not divide {whose} {heads} attention heads: edit {key}"

    def trial(self, model: PreTrainedModel) -> None:
        from .sequence import try_shard

        try_shard(model, self.size)

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """An all-to-all of queries, keys, values and output in each block, forward and backward."""
        mesh, sizes, size = self.mesh, self.sizes, self.size
        heads, key_heads, width = facts.heads
        heads += max(key_heads, size * sizes.tp)  # fewer heads of keys are repeated
        blocks = facts.layers * mesh.accumulation(facts) / sizes.pp
        moved = 4 * blocks * mesh.tokens(facts) * heads * width / sizes.tp
        yield Sent("all_to_all", moved, mesh.used_bytes(facts), size, 8 * blocks, size, waits=True)


AXES += [PipelineAxis, ReplicaAxis, ShardAxis, TensorAxis, ExpertAxis, SequenceAxis]


def experts_of(config: object) -> tuple[str, int]:
    """Returns the field with the number of experts, and the number; 0 if there are none."""
    for name in EXPERTS:
        if isinstance(number := getattr(config, name, None), int):
            return name, number
    return EXPERTS[0], 0


def shards_heads(plan: Mapping[str, str]) -> bool:
    return any(rule.endswith(QUERIES) and style == "colwise" for rule, style in plan.items())


def _divides_key_heads(plan: dict[str, str], heads: int, size: int) -> bool:
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    return get_kv_heads_per_rank(plan, heads, size) is not None


def plan_of(setup: Configured, kind: str, given: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the model's rules, overridden by the user's; {} as tp_plan means none."""
    if setup.text_config is None or (kind == "tp" and given == {}):
        return {}
    name = f"base_model_{kind}_plan"
    rules = getattr(setup.model_config, name, None) or getattr(setup.text_config, name, None)
    return {**(rules or {}), **(given or {})}


def without_plan(setup: Configured, kind: str, size: int, what: str) -> Iterator[str]:
    """Tensor and expert parallelism need a plan that says how each module is sharded."""
    key, config = f"{ARGS}.{kind}_size", setup.model_config
    if config is None:
        yield (
            f"{kind}_size {size} needs a model of transformers, which has a plan for {what} parallelism: set {key} to"
            " 1, or return the model's configuration from build_config in module.py"
        )
    elif config is not NOT_READ_YET:
        yield (
            f"{kind}_size {size}: a model of type {config.model_type!r} has no plan for {what}"
            f" parallelism; set {key} to 1, or give rules as {ARGS}.{kind}_plan"
        )
