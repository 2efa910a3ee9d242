"""MeshStrategy's memory, messages and time: a function for each axis, and a class that combines
them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ..configured import ARGS
from ..spec.base import SLOWER, Estimate
from ..spec.facts import STATE, BlockRun, Facts, Saving, Sent
from .pipeline.stages import SPLIT_BACKWARD, V_SHAPED, StageFacts, needed_micro_batches
from .sizes import MeshSizes
from .spec import Mesh


class Stages(NamedTuple):
    """A pipeline's stages as memory and time need them; the defaults are a model of one stage."""

    largest: float = 1.0  # share of the parameters on the rank that has most
    mean: float = 1.0  # share of the parameters on a rank, with the copies of tied ones
    blocks: int = 0  # on the rank that has most
    kept: float = 1.0  # micro-batches whose activations the rank keeps that keeps most
    kept_at_end: float = 1.0  # the same of the rank that has the last stage
    crossings: int = 0  # pairs of stages between which messages are sent


@dataclass(frozen=True)
class MeshEstimate(Mesh, Estimate):
    """Multiplies and chains what the axes need."""

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


def kept_micro_batches(schedule: str, p: int, v: int, m: int) -> tuple[float, float]:
    """Returns of how many micro-batches a rank keeps activations: the rank that keeps most, and the
    one that has the last stage.

    A rank keeps what runs before its first backward pass (Narayanan et al., arXiv:2104.04473,
    section 2.2). If gradients of weights are computed later, gradients of activations are kept for
    them: in the pass as many as activations, then half of them."""
    if schedule == "GPipe":
        return m, m
    if schedule in ("1F1B", "Interleaved1F1B"):
        return p + (p - 1) * (v > 1) / v, ((v - 1) * p + 1) / v
    if schedule == "InterleavedZeroBubble":
        most = p + (p + 1) / v / 2
    elif schedule == "ZBVZeroBubble":
        return (3 * p - 1) / 2, p + 1 / 2
    else:
        most = p + 1 / 2
    return most, most


def _pipeline(mesh: MeshEstimate, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """Hidden states and their gradients; the gradients of the two copies of a tied weight."""
    p, stages, span = sizes.pp, mesh.stages(facts), facts.world_size // sizes.pp + 1
    passes = 2 * stages.crossings * mesh.accumulation(facts) / p
    yield Sent("send", passes * mesh.tokens(facts) * facts.width, mesh.used_bytes(facts), 2, span)
    tied = (stages.mean * p - 1) * facts.parameters
    if tied > 1 / 2:
        yield Sent("all_reduce", 2 / p * tied / sizes.fsdp / sizes.tp, 4, 2, span)


def _replicas(mesh: MeshEstimate, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """Gradients of a rank's shard, once per step."""
    own, span = mesh.mean_share(facts) * facts.trainable, facts.world_size // sizes.pp
    yield Sent("all_reduce", own, mesh.weight_bytes(facts), sizes.dp_replicate, span)


def _shards(mesh: MeshEstimate, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """Units are gathered in forward and, but for the norm and the head, again in backward;
    gradients are scattered in each micro-batch or the last. Experts of expert parallelism are
    units of their own, over fewer ranks. In a pipeline both happen once per step."""
    span, m = sizes.fsdp * sizes.tp, mesh.accumulation(facts)
    experts = facts.experts / sizes.ep / sizes.pp if sizes.ep > 1 else 0.0  # before FSDP
    dense = mesh.mean_share(facts) * facts.parameters * sizes.fsdp - experts * sizes.ep / sizes.tp
    head = facts.vocab_size * facts.width / sizes.tp
    for elements, ranks, kept in ((dense, sizes.fsdp, head), (experts, span // sizes.ep, 0.0)):
        gathered, reduces = m * (2 * elements - kept), m if mesh.reduce_each_micro_batch else 1
        if sizes.pp > 1:
            gathered, reduces = elements, 1
        if elements:
            yield Sent("all_gather", gathered, mesh.used_bytes(facts), ranks, span)
            scattered = reduces * elements * facts.trainable / facts.parameters
            yield Sent("reduce_scatter", scattered, mesh.weight_bytes(facts), ranks, span)


def _tensor(mesh: MeshEstimate, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """Activations: an output summed in forward, or the gradient of an input in backward. Under
    expert parallelism the ranks, which have the same tokens, each send a part of them: what
    comes back is gathered, and in backward the gradients of hidden states and weights."""
    tokens, gathered = mesh.tokens(facts) * mesh.accumulation(facts) / sizes.pp, facts.vocab_size
    if sizes.ep > 1:
        gathered += facts.moe_layers * (2 * facts.width + facts.experts_per_token)
    for kind, elements in (("all_reduce", facts.tp_widths), ("all_gather", gathered)):
        yield Sent(kind, tokens * elements, mesh.used_bytes(facts), sizes.tp, sizes.tp, waits=True)


def _experts(mesh: MeshEstimate, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """Each token to the ranks that hold its experts and back, in forward and in backward."""
    passes = 4 * facts.moe_layers * mesh.accumulation(facts) / sizes.pp
    moved = mesh.tokens(facts) * facts.experts_per_token * facts.width / sizes.tp
    yield Sent("all_to_all", passes * moved, mesh.used_bytes(facts), sizes.ep, sizes.ep, waits=True)


def _sequences(mesh: MeshEstimate, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """An all-to-all of queries, keys, values and output in each block, forward and backward."""
    heads, key_heads, width = facts.heads
    heads += max(key_heads, sizes.cp * sizes.tp)  # fewer heads of keys are repeated
    blocks = facts.layers * mesh.accumulation(facts) / sizes.pp
    moved = 4 * blocks * mesh.tokens(facts) * heads * width / sizes.tp
    yield Sent("all_to_all", moved, mesh.used_bytes(facts), sizes.cp, sizes.cp, waits=True)


TRAFFIC: dict[str, Callable[[MeshEstimate, MeshSizes, Facts], Iterator[Sent]]] = {
    "pp": _pipeline,
    "dp_replicate": _replicas,
    "fsdp": _shards,
    "tp": _tensor,
    "ep": _experts,
    "cp": _sequences,
}
