"""The stages of a mesh's pipeline as memory and time need them, and what each axis sends."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..spec.facts import Facts, Sent
from .sizes import MeshSizes


class Stages(NamedTuple):
    """A pipeline's stages as memory and time need them; the defaults are a model of one stage."""

    largest: float = 1.0  # share of the parameters on the rank that has most
    mean: float = 1.0  # share of the parameters on a rank, with the copies of tied ones
    blocks: int = 0  # on the rank that has most
    kept: float = 1.0  # micro-batches whose activations the rank keeps that keeps most
    kept_at_end: float = 1.0  # the same of the rank that has the last stage
    crossings: int = 0  # pairs of stages between which messages are sent


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


def _pipeline(mesh: Any, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """Hidden states and their gradients; the gradients of the two copies of a tied weight."""
    p, stages, span = sizes.pp, mesh.stages(facts), facts.world_size // sizes.pp + 1
    passes = 2 * stages.crossings * mesh.accumulation(facts) / p
    yield Sent("send", passes * mesh.tokens(facts) * facts.width, mesh.used_bytes(facts), 2, span)
    tied = (stages.mean * p - 1) * facts.parameters
    if tied > 1 / 2:
        yield Sent("all_reduce", 2 / p * tied / sizes.fsdp / sizes.tp, 4, 2, span)


def _replicas(mesh: Any, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """Gradients of a rank's shard, once per step."""
    own, span = mesh.mean_share(facts) * facts.trainable, facts.world_size // sizes.pp
    yield Sent("all_reduce", own, mesh.weight_bytes(facts), sizes.dp_replicate, span)


def _shards(mesh: Any, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
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


def _tensor(mesh: Any, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """Activations: an output summed in forward, or the gradient of an input in backward. Under
    expert parallelism the ranks, which have the same tokens, each send a part of them: what
    comes back is gathered, and in backward the gradients of hidden states and weights."""
    tokens, gathered = mesh.tokens(facts) * mesh.accumulation(facts) / sizes.pp, facts.vocab_size
    if sizes.ep > 1:
        gathered += facts.moe_layers * (2 * facts.width + facts.experts_per_token)
    for kind, elements in (("all_reduce", facts.tp_widths), ("all_gather", gathered)):
        yield Sent(kind, tokens * elements, mesh.used_bytes(facts), sizes.tp, sizes.tp, waits=True)


def _experts(mesh: Any, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """Each token to the ranks that hold its experts and back, in forward and in backward."""
    passes = 4 * facts.moe_layers * mesh.accumulation(facts) / sizes.pp
    moved = mesh.tokens(facts) * facts.experts_per_token * facts.width / sizes.tp
    yield Sent("all_to_all", passes * moved, mesh.used_bytes(facts), sizes.ep, sizes.ep, waits=True)


def _sequences(mesh: Any, sizes: MeshSizes, facts: Facts) -> Iterator[Sent]:
    """An all-to-all of queries, keys, values and output in each block, forward and backward."""
    heads, key_heads, width = facts.heads
    heads += max(key_heads, sizes.cp * sizes.tp)  # fewer heads of keys are repeated
    blocks = facts.layers * mesh.accumulation(facts) / sizes.pp
    moved = 4 * blocks * mesh.tokens(facts) * heads * width / sizes.tp
    yield Sent("all_to_all", moved, mesh.used_bytes(facts), sizes.cp, sizes.cp, waits=True)


TRAFFIC: dict[str, Callable[[Any, MeshSizes, Facts], Iterator[Sent]]] = {
    "pp": _pipeline,
    "dp_replicate": _replicas,
    "fsdp": _shards,
    "tp": _tensor,
    "ep": _experts,
    "cp": _sequences,
}
