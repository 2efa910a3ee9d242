"""HSDP: replicas of what fsdp shards."""

from collections.abc import Iterator

from ...spec.facts import Facts, Sent
from .axis import Axis


class ReplicaAxis(Axis):
    """Replicas, usually one per node, which all-reduce the gradients of their shards."""

    name = "dp_replicate"
    reads_own_rows = allows_manual = True
    is_proven = False

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Gradients of a rank's shard, once per step."""
        own = self.spec.mean_share(facts) * facts.trainable
        span = facts.world_size // self.sizes.pp
        yield Sent("all_reduce", own, self.spec.weight_bytes(facts), self.size, span)
