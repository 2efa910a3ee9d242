"""Tensor parallelism: ranks share each matrix product, by the model's plan."""

from collections.abc import Iterator

from ...configured import ARGS, Configured
from ...spec.facts import Facts, Sent
from ..plans import plan_of, shards_heads, without_plan
from .axis import Axis


class TensorAxis(Axis):
    """Ranks that have each some heads and features of every block."""

    name = "tp"
    draws_own = False

    def refusals(self, setup: Configured) -> Iterator[str]:
        """A plan, and heads that it does not split."""
        size, config = self.size, setup.text_config
        plan = plan_of(setup, "tp", self.argument("tp_plan"))
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

    def share(self, facts: Facts) -> float:
        """Of what the plan names; the rest is on every rank."""
        replicated = 1 + facts.tp_replicates / facts.parameters * (self.size - 1)
        return replicated / self.size

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Activations: an output summed in forward, or the gradient of an input in backward. Under
        expert parallelism the ranks, which have the same tokens, each send a part of them: what
        comes back is gathered, and in backward the gradients of hidden states and weights."""
        passes = self.spec.accumulation(facts) / self.sizes.pp
        tokens = self.spec.tokens(facts) * passes
        gathered = facts.vocab_size
        if self.sizes.ep > 1:
            gathered += facts.moe_layers * (2 * facts.width + facts.experts_per_token)
        width, size = self.spec.used_bytes(facts), self.size
        yield Sent("all_reduce", tokens * facts.tp_widths, width, size, size, waits=True)
        yield Sent("all_gather", tokens * gathered, width, size, size, waits=True)
