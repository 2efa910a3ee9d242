"""FSDP2: parameters are gathered where they are used, and gradients reduce-scattered."""

from collections.abc import Iterator

from ...spec.facts import Facts, Sent
from .axis import Axis


class ShardAxis(Axis):
    """Ranks that have each a shard of every parameter, gradient and moment.

    A pipeline is ZeRO-1 inside of a stage (pipeline.py): its units are gathered once per step."""

    name, default = "fsdp", "auto"
    reads_own_rows = allows_manual = True

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are scattered in each micro-batch, not in the last one alone."""
        return self.argument("reduce_each_micro_batch", True)

    def share(self, facts: Facts) -> float:
        return 1 / self.size

    def block(self, facts: Facts) -> float:
        """Returns the parameters of the largest block, gathered: other ranks' experts of expert
        parallelism are not."""
        sizes, experts = self.sizes, facts.block_experts
        largest = facts.block or (facts.parameters - facts.embedding) / facts.layers
        if sizes.ep > 1:
            return (largest - experts) / sizes.tp + experts / sizes.ep
        return largest / sizes.tp

    def buffers(self, facts: Facts) -> dict[str, float]:
        """The running block, the next one, and the embedding or the head."""
        if self.sizes.pp > 1:
            return {}
        head = facts.vocab_size * facts.width / self.sizes.tp
        gathered = 2 * self.block(facts) + head
        parts = {"gathered weights": gathered * self.spec.used_bytes(facts)}
        if not self.reduces_each and self.spec.accumulation(facts) > 1:
            unsharded = facts.trainable / self.sizes.tp
            parts["unsharded gradients"] = unsharded * self.spec.weight_bytes(facts)
        return parts

    def correct_traced(self, parts: dict[str, float], facts: Facts) -> None:
        """Adds the block whose gradients are being reduced."""
        if self.sizes.pp == 1:
            width = self.spec.used_bytes(facts) + self.spec.weight_bytes(facts)
            parts["backward"] += self.block(facts) * width

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Units are gathered in forward and, but for the norm and the head, again in backward;
        gradients are scattered in each micro-batch or the last. Experts of expert parallelism are
        units of their own, over fewer ranks. In a pipeline both happen once per step."""
        sizes, m = self.sizes, self.spec.accumulation(facts)
        span = sizes.fsdp * sizes.tp
        experts = facts.experts / sizes.ep / sizes.pp if sizes.ep > 1 else 0.0  # before FSDP
        stored = self.spec.mean_share(facts) * facts.parameters
        dense = stored * sizes.fsdp - experts * sizes.ep / sizes.tp
        head = facts.vocab_size * facts.width / sizes.tp
        for elements, ranks, kept in ((dense, sizes.fsdp, head), (experts, span // sizes.ep, 0.0)):
            gathered, reduces = m * (2 * elements - kept), m if self.reduces_each else 1
            if sizes.pp > 1:
                gathered, reduces = elements, 1
            if elements:
                yield Sent("all_gather", gathered, self.spec.used_bytes(facts), ranks, span)
                scattered = reduces * elements * facts.trainable / facts.parameters
                width = self.spec.weight_bytes(facts)
                yield Sent("reduce_scatter", scattered, width, ranks, span)
