"""The axes of MeshStrategy's mesh: what each refuses, keeps and sends. An axis is one class. No
torch.

    dense parameters    (pp, dp_replicate, fsdp, tp)
    experts             (pp, dp_replicate, efsdp, ep),  efsdp = fsdp x tp / ep
    sequences           cp neighbours along fsdp share each sequence
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

from ..errors import InputError
from .facts import ARGS, NOT_READ_YET, Configured, Facts, Sent
from .pipeline.costs import Layers, Schedule, Stages
from .plain import Plain, selective_refusal

Size = int | Literal["auto"]
QUERIES = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")  # whose columns are heads
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


class MeshSizes(dict[str, int]):
    """Ranks along each axis, by its name: `sizes.tp` is `sizes["tp"]`."""

    pp: int
    dp_replicate: int
    fsdp: int
    tp: int
    ep: int
    cp: int

    def __getattr__(self, name: str) -> int:
        return self[name]


@dataclass(frozen=True)
class Keys(Plain):
    """The keys of MeshStrategy; the sizes are in `arguments`, by `Axis.key`."""

    name: str = "MeshStrategy"
    pp_schedule: Schedule = "1F1B"
    pp_stages_per_rank: int = 2
    pp_layers: Layers = "cost"
    tp_plan: Mapping[str, str] | None = None
    ep_plan: Mapping[str, str] | None = None
    cpu_offload: bool = False
    reduce_each_micro_batch: bool = True

    def sizes(self, world_size: int) -> MeshSizes:
        raise NotImplementedError

    def stages(self, facts: Facts) -> Stages:
        raise NotImplementedError

    def rules(self, model: Any, sizes: MeshSizes) -> dict[str, str]:
        """Returns the plans of `model`, built, with the user's changes."""
        rules = model.tp_plan | (self.tp_plan or {})
        return rules | model.ep_plan | (self.ep_plan or {}) if sizes.ep > 1 else rules

    def block(self, facts: Facts) -> float:
        """Returns the parameters of the largest block, gathered by FSDP2: other ranks' experts of
        expert parallelism are not."""
        sizes, experts = self.sizes(facts.world_size), facts.block_experts
        largest = facts.block or (facts.parameters - facts.embedding) / facts.layers
        if sizes.ep > 1:
            return (largest - experts) / sizes.tp + experts / sizes.ep
        return largest / sizes.tp

    def mean_share(self, facts: Facts) -> float:
        """Returns the mean over ranks of the share of the parameters that a rank stores."""
        stages = self.stages(facts)
        return self.share(facts) * stages.mean / stages.largest


class Axis:
    """A dimension of the mesh. Its methods are called where its size is above 1.

    Attributes:
        name: Of the dimension; its key in the configuration is NAME_size.
        default: Of that key.
        adds_ranks: Whether its size is a factor of the number of ranks.
        reads_its_own_rows: Whether ranks that differ only here read different batches.
        draws_its_own: Whether they have random streams of their own (dropout).
        is_proven: Whether proof.json has it; replicas compute what one process computes.
        has_trial: Whether `trial` runs a rank's part of a model.
    """

    name = ""
    default: Size = 1
    adds_ranks = True
    reads_its_own_rows = False
    draws_its_own = True
    is_proven = True
    has_trial = False

    @property
    def key(self) -> str:
        return f"{self.name}_size"

    def resolved(self, given: Size, sizes: MeshSizes) -> int:
        """Returns the size of an axis that adds no ranks; `sizes` has the others.

        Raises:
            InputError: it does not fit them.
        """
        raise NotImplementedError

    def share(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> float:
        """Returns the share of the parameters that a rank stores."""
        return 1.0

    def buffers(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> dict[str, float]:
        """Returns bytes of a rank besides its shards, by part."""
        return {}

    def refusals(self, sizes: MeshSizes, mesh: Keys, setup: Configured) -> Iterator[str]:
        return iter(())

    def trial(self, sizes: MeshSizes, mesh: Keys, model: Any) -> None:
        """Runs a rank's part of `model` on the meta device; raises what a training would."""

    def traffic(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> Iterator[Sent]:
        return iter(())

    def small(self, given: Size, mesh: Keys) -> list[Size]:
        """Returns the sizes for a rehearsal, the best first: 2 for what is above 1."""
        return [given if given in (1, "auto") else 2]

    def is_kept(self, mesh: Keys, small: MeshSizes) -> bool:
        """Returns whether `small` has the kinds of parallelism that `mesh` has along this axis."""
        return True

    def fitted(self, given: Size, sizes: MeshSizes) -> Size:
        """Returns the size of an axis that adds no ranks, on fewer ranks; `sizes` are theirs."""
        return given


class ReplicaAxis(Axis):
    """HSDP: replicas of what fsdp shards."""

    name = "dp_replicate"
    reads_its_own_rows = True
    is_proven = False

    def traffic(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> Iterator[Sent]:
        """Gradients of a rank's shard, once per step."""
        own, span = mesh.mean_share(facts) * facts.trainable, facts.world_size // sizes.pp
        calls = (facts.layers + 2) / sizes.pp
        yield Sent("all_reduce", own, mesh.weight_bytes(facts), sizes.dp_replicate, calls, span)

    def small(self, given: Size, mesh: Keys) -> list[Size]:
        """Three kinds of parallelism would need 8 processes: replication is dropped then."""
        return [*super().small(given, mesh), *[1] * (given != 1)]


class ShardAxis(Axis):
    """FSDP2: parameters are gathered where they are used, and gradients reduce-scattered."""

    name = "fsdp"
    default = "auto"
    reads_its_own_rows = True

    def share(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> float:
        return 1 / sizes.fsdp

    def buffers(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> dict[str, float]:
        """The running block, the next one, and the embedding or the head are gathered."""
        if sizes.pp > 1:
            return {}
        gathered = 2 * mesh.block(facts) + facts.vocab_size * facts.width / sizes.tp
        parts = {"gathered weights": gathered * mesh.used_bytes(facts)}
        if not mesh.reduce_each_micro_batch and mesh.accumulation(facts) > 1:
            parts["unsharded gradients"] = facts.trainable / sizes.tp * mesh.weight_bytes(facts)
        return parts

    def traffic(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> Iterator[Sent]:
        """Units are gathered in forward and, but for the norm and the head, again in backward;
        gradients are scattered in each micro-batch or the last. Experts of expert parallelism are
        units of their own, over fewer ranks. In a pipeline both happen once per step."""
        span, m = sizes.fsdp * sizes.tp, mesh.accumulation(facts)
        experts = facts.experts / sizes.ep / sizes.pp if sizes.ep > 1 else 0.0  # before FSDP
        dense = mesh.mean_share(facts) * facts.parameters * sizes.fsdp
        dense -= experts * sizes.ep / sizes.tp
        head = facts.vocab_size * facts.width / sizes.tp
        calls, num_kept = (facts.layers + 2) / sizes.pp, 1 + facts.is_tied
        units = [(dense, sizes.fsdp, calls, head, num_kept)]
        if experts:
            units.append((experts, span // sizes.ep, facts.moe_layers / sizes.pp, 0, 0))
        for elements, ranks, calls, kept, num_kept in units:
            gathered, gathers = m * (2 * elements - kept), m * (2 * calls - num_kept)
            reduces = m if mesh.reduce_each_micro_batch else 1
            if sizes.pp > 1:
                gathered, gathers, reduces = elements, calls, 1
            yield Sent("all_gather", gathered, mesh.used_bytes(facts), ranks, gathers, span)
            scattered = reduces * elements * facts.trainable / facts.parameters
            width = mesh.weight_bytes(facts)
            yield Sent("reduce_scatter", scattered, width, ranks, reduces * calls, span)

    def small(self, given: Size, mesh: Keys) -> list[Size]:
        """4 if experts would not stay sharded; dropped in a pipeline before 8 are needed."""
        sizes = super().small(given, mesh)
        if sizes == [2]:
            sizes.append(4)
        has_stages = mesh.arguments.get("pp_size", 1) != 1
        return [*sizes, *[1] * (has_stages and given != 1)]


class TensorAxis(Axis):
    """Tensor parallelism: ranks share each matrix product, by the model's plan."""

    name = "tp"
    draws_its_own = False
    has_trial = True

    def share(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> float:
        return (1 + facts.tp_replicates / facts.parameters * (sizes.tp - 1)) / sizes.tp

    def refusals(self, sizes: MeshSizes, mesh: Keys, setup: Configured) -> Iterator[str]:
        if setup.setting("loss_kernel") == "liger":
            yield (
                "model.loss_kernel liger needs the full output layer, and tensor parallelism"
                f" (tp_size {sizes.tp}) shards it: set torch"
            )
        plan = plan_of(setup, "tp", mesh.tp_plan)
        if not plan:
            yield from without_plan(setup, "tp", sizes.tp, "tensor")
        elif setup.text_config is not None:
            yield from self._heads(sizes.tp, setup, plan)
        for key in ("quantize", "dora"):
            if setup.setting(f"adapter.{key}"):
                yield (
                    f"model.adapter.{key} does not work with tensor parallelism: unset it, or set"
                    f" {ARGS}.tp_size {sizes.tp} to 1"
                )

    def _heads(self, size: int, setup: Configured, plan: dict[str, str]) -> Iterator[str]:
        from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

        queries = getattr(setup.text_config, "num_attention_heads", None)
        keys = getattr(setup.text_config, "num_key_value_heads", None) or queries
        broken = ""
        if shards_heads(plan) and isinstance(queries, int) and queries % size:
            broken = f"num_attention_heads {queries}"
        elif keys is not None and get_kv_heads_per_rank(plan, keys, size) is None:
            broken = f"num_key_value_heads {keys}"
        if broken:
            yield (
                f"the model's {broken} is not a multiple of tp_size {size}, and no head is split:"
                f" edit {ARGS}.tp_size, or model.architecture"
            )

    def trial(self, sizes: MeshSizes, mesh: Keys, model: Any) -> None:
        from .shard import complete_plan, refuse_adapters

        refuse_adapters(model)
        complete_plan(model, mesh.rules(model, sizes), sizes.tp)

    def traffic(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> Iterator[Sent]:
        """Activations: an output summed in forward, or the gradient of an input in backward. Under
        expert parallelism the ranks, which have the same tokens, each send a part of them: what
        comes back is gathered, and in backward the gradients of hidden states and weights."""
        m, width = mesh.accumulation(facts) / sizes.pp, mesh.used_bytes(facts)
        tokens, gathered, calls = m * mesh.tokens(facts), facts.vocab_size, 1
        if sizes.ep > 1:
            gathered += facts.moe_layers * (2 * facts.width + facts.experts_per_token)
            calls += 3 * facts.moe_layers
        for kind, elements, number in (
            ("all_reduce", facts.tp_widths, facts.tp_calls),
            ("all_gather", gathered, calls),
        ):
            yield Sent(kind, tokens * elements, width, sizes.tp, m * number, sizes.tp, waits=True)


class ExpertAxis(Axis):
    """Expert parallelism: ranks hold different experts."""

    name = "ep"
    adds_ranks = False

    def resolved(self, given: Size, sizes: MeshSizes) -> int:
        return sizes.fsdp * sizes.tp if given == "auto" else given

    def refusals(self, sizes: MeshSizes, mesh: Keys, setup: Configured) -> Iterator[str]:
        size = sizes.ep
        if size % sizes.tp or sizes.fsdp * sizes.tp % size:
            yield (
                f"ep_size {size} must be a multiple of tp_size {sizes.tp} and divide fsdp_size"
                f" {sizes.fsdp} x tp_size {sizes.tp} = {sizes.fsdp * sizes.tp}; edit {ARGS}.ep_size"
            )
        if not plan_of(setup, "ep", mesh.ep_plan):
            yield from without_plan(setup, "ep", size, "expert")
        elif setup.text_config is not None:
            name, number = experts_of(setup.text_config)
            if number % size:
                yield (
                    f"the model's {name} {number} is not a multiple of ep_size {size}, and no"
                    f" expert is split: edit {ARGS}.ep_size, or model.architecture"
                )
        yield from selective_refusal(setup, "ep_size > 1")

    def is_kept(self, mesh: Keys, small: MeshSizes) -> bool:
        """Experts stay sharded by FSDP, except in a pipeline, which would need 8 processes."""
        fsdp, tp, given = (
            mesh.arguments.get(key, 1) for key in ("fsdp_size", "tp_size", "ep_size")
        )
        ranks = small.fsdp * small.tp
        if given == 1:
            return True
        if small.pp > 1:
            return 1 < small.ep <= ranks
        is_sharded = given != "auto" and ("auto" in (fsdp, tp) or fsdp * tp > given)
        return not is_sharded or ranks > small.ep

    def fitted(self, given: Size, sizes: MeshSizes) -> Size:
        return given if given == "auto" else min(given, sizes.fsdp * sizes.tp)

    def traffic(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> Iterator[Sent]:
        """Each token to the ranks that hold its experts and back, in forward and in backward."""
        calls = 4 * facts.moe_layers * mesh.accumulation(facts) / sizes.pp
        moved = mesh.tokens(facts) * facts.experts_per_token * facts.width / sizes.tp
        width = mesh.used_bytes(facts)
        yield Sent("all_to_all", calls * moved, width, sizes.ep, calls, sizes.ep, waits=True)


class SequenceAxis(Axis):
    """Sequence parallelism: neighbours along fsdp share each sequence."""

    name = "cp"
    adds_ranks = False
    has_trial = True

    def resolved(self, given: Size, sizes: MeshSizes) -> int:
        if given == "auto" or given < 1 or sizes.fsdp % given:
            raise InputError(f"cp_size {given} must divide fsdp_size {sizes.fsdp}: edit cp_size")
        return given

    def fitted(self, given: Size, sizes: MeshSizes) -> Size:
        return given if given == "auto" else gcd(given, sizes.fsdp)

    def refusals(self, sizes: MeshSizes, mesh: Keys, setup: Configured) -> Iterator[str]:
        """Ranks that share sequences divide tokens and heads; some losses need full sequences."""
        size, key, config = sizes.cp, f"{ARGS}.cp_size", setup.text_config
        if setup.model_config is None:
            yield f"cp_size {size} needs a model of transformers: set {key} to 1"
        if (seq_len := getattr(setup.data, "seq_len", 0)) % size:
            yield f"data.seq_len {seq_len} is not a multiple of cp_size {size}: edit one of them"
        if getattr(getattr(setup.data, "source", None), "pairs", False):
            yield f"cp_size {size} would split pairs of data.source Preferences: set {key} to 1"
        if setup.setting("balance.sequence_loss_coef"):
            either = f"set it to 0, or {key} to 1"
            yield f"model.balance.sequence_loss_coef needs full sequences: {either}"
        if config is None:
            return
        heads, whose = getattr(config, "num_attention_heads", 0), "the model's"
        if sizes.tp > 1 and shards_heads(plan_of(setup, "tp", mesh.tp_plan)):
            heads, whose = heads // sizes.tp, f"a rank's (tp_size {sizes.tp})"
        if heads % size:
            yield f"cp_size {size} does not divide {whose} {heads} attention heads: edit {key}"

    def trial(self, sizes: MeshSizes, mesh: Keys, model: Any) -> None:
        from .sequence import try_shard

        try_shard(model, sizes.cp)

    def traffic(self, sizes: MeshSizes, mesh: Keys, facts: Facts) -> Iterator[Sent]:
        """An all-to-all of queries, keys, values and output in each block, forward and backward."""
        queries, pairs, width = facts.heads
        pairs = max(pairs, sizes.cp * sizes.tp)  # fewer are repeated
        blocks = facts.layers * mesh.accumulation(facts) / sizes.pp
        elements = 4 * blocks * mesh.tokens(facts) * (queries + pairs) * width / sizes.tp
        size = mesh.used_bytes(facts)
        yield Sent("all_to_all", elements, size, sizes.cp, 8 * blocks, sizes.cp, waits=True)


def experts_of(config: Any) -> tuple[str, int]:
    """Returns the field with the number of experts, and the number; 0 if there are none."""
    for name in EXPERTS:
        if isinstance(number := getattr(config, name, None), int):
            return name, number
    return EXPERTS[0], 0


def shards_heads(plan: Mapping[str, str]) -> bool:
    return any(rule.endswith(QUERIES) and style == "colwise" for rule, style in plan.items())


def plan_of(setup: Configured, kind: str, given: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the model's rules, overridden by the user's; {} as tp_plan means none."""
    config = setup.model_config
    if setup.text_config is None or (kind == "tp" and given == {}):
        return {}
    name = f"base_model_{kind}_plan"
    rules = getattr(config, name, None) or getattr(setup.text_config, name, None)
    return {**(rules or {}), **(given or {})}


def without_plan(setup: Configured, kind: str, size: int, what: str) -> Iterator[str]:
    """Tensor and expert parallelism need a plan that says how each module is sharded."""
    key, config = f"{ARGS}.{kind}_size", setup.model_config
    if config is NOT_READ_YET:
        return
    if config is None:
        yield (
            f"{kind}_size {size} needs a model of transformers, which has a plan for {what}"
            f" parallelism: set {key} to 1, or return the model's configuration from build_config"
            " in module.py"
        )
    else:
        yield (
            f"{kind}_size {size}: a model of type {config.model_type!r} has no plan for {what}"
            f" parallelism; set {key} to 1, or give rules as {ARGS}.{kind}_plan"
        )
