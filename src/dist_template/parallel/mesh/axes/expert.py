"""Expert parallelism: ranks hold different experts."""

from collections.abc import Iterator
from typing import Any

from ...configured import ARGS, Configured
from ...spec.facts import Facts, Sent
from ...spec.refusals import measured_refusal, selective_refusal
from ..plans import experts_of, plan_of, without_plan
from .axis import Axis


class ExpertAxis(Axis):
    """Neighbours along fsdp and tp that have each some of the experts."""

    name = "ep"
    adds_ranks = False

    def refusals(self, setup: Configured) -> Iterator[str]:
        """A plan, and a size that divides ranks and experts."""
        size, fsdp, tp = self.size, self.sizes.fsdp, self.sizes.tp
        if size % tp or fsdp * tp % size:
            product = f"fsdp_size {fsdp} x tp_size {tp} = {fsdp * tp}"
            yield (
                f"ep_size {size} must be a multiple of tp_size {tp} and divide {product}; edit"
                f" {ARGS}.ep_size"
            )
        if not plan_of(setup, "ep", self.argument("ep_plan")):
            yield from without_plan(setup, "ep", size, "expert")
        else:
            name, number = experts_of(setup.text_config)
            if number % size:
                yield (
                    f"the model's {name} {number} is not a multiple of ep_size {size}, and no"
                    f" expert is split: edit {ARGS}.ep_size, or model.architecture"
                )
        yield from selective_refusal(setup, "ep_size > 1")
        yield from measured_refusal(setup, "ep_size > 1")

    def reduced(self, notes: list[str]) -> dict[str, Any]:
        given = self.argument(self.key, self.default)
        if given != "auto":
            given = min(given, 2, self.sizes.fsdp * self.sizes.tp)
        return {self.key: given}

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Each token to the ranks that hold its experts and back, in forward and in backward."""
        passes = 4 * facts.moe_layers * self.spec.accumulation(facts) / self.sizes.pp
        tokens = self.spec.tokens(facts) * facts.experts_per_token
        elements = passes * (tokens * facts.width / self.sizes.tp)
        width = self.spec.used_bytes(facts)
        yield Sent("all_to_all", elements, width, self.size, self.size, waits=True)

    def allows(self, facts: Facts) -> bool:
        return facts.checkpointing != "selective"
