"""Sequence parallelism: neighbours along fsdp share each sequence."""

from collections.abc import Iterator
from math import gcd
from typing import Any

from ...configured import ARGS, Configured
from ...spec.facts import Facts, Sent
from ..plans import plan_of, shards_heads
from .axis import Axis


class SequenceAxis(Axis):
    """Ranks that have each consecutive tokens of every sequence; ../sequence.py runs them."""

    name = "cp"
    adds_ranks = False
    shares_sequences = True

    def refusals(self, setup: Configured) -> Iterator[str]:
        """Ranks that share sequences divide tokens and heads."""
        size, tp, key = self.size, self.sizes.tp, f"{ARGS}.cp_size"
        if setup.model_config is None:
            yield f"cp_size {size} needs a model of transformers: set {key} to 1"
        seq_len = getattr(setup.data, "seq_len", 0)
        if seq_len % size:
            yield f"data.seq_len {seq_len} is not a multiple of {key} {size}: edit one of them"
        if getattr(getattr(setup.data, "source", None), "pairs", False):
            yield f"cp_size {size} would split pairs of data.source Preferences: set {key} to 1"
        heads, whose = getattr(setup.text_config, "num_attention_heads", 0), "the model's"
        if tp > 1 and shards_heads(plan_of(setup, "tp", self.argument("tp_plan"))):
            heads, whose = heads // tp, f"a rank's (tp_size {tp})"
        if heads % size:
            yield f"cp_size {size} does not divide {whose} {heads} attention heads: edit {key}"

    def reduced(self, notes: list[str]) -> dict[str, Any]:
        return {self.key: gcd(self.argument(self.key, self.default), self.sizes.fsdp)}

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """An all-to-all of queries, keys, values and output in each block, forward and backward."""
        heads, key_heads, width = facts.heads
        heads += max(key_heads, self.size * self.sizes.tp)  # fewer heads of keys are repeated
        blocks = facts.layers * self.spec.accumulation(facts) / self.sizes.pp
        moved = 4 * blocks * self.spec.tokens(facts) * heads * width / self.sizes.tp
        used = self.spec.used_bytes(facts)
        yield Sent("all_to_all", moved, used, self.size, self.size, waits=True)
