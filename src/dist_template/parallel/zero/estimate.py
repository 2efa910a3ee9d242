"""Memory and messages of DeepSpeed's ZeRO. DeepSpeed 0.19 keeps an fp32 copy of the weights at
every stage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..configured import ARGS
from ..spec.base import ADAMW_BYTES, SLOWER, Estimate
from ..spec.facts import BlockRun, Facts, Saving, Sent
from .spec import BUCKET, Zero

LIVE_PARAMETERS = 10**9  # stage3_max_live_parameters of DeepSpeed: what ZeRO-3 gathers at most


@dataclass(frozen=True)
class ZeroEstimate(Zero, Estimate):
    """What the stages shard and send."""

    creates_state_at_start: ClassVar[bool] = True

    def weight_bytes(self, facts: Facts) -> int:
        """Returns the bytes of a stored weight: 2 under -mixed too, besides the fp32 copy."""
        return 2 if facts.is_half else 4

    def state(self, facts: Facts) -> dict[str, float]:
        width, n, is_3 = self.weight_bytes(facts), facts.world_size, self.stage == 3
        bucket = self.zero.get("reduce_bucket_size", BUCKET)
        if bucket == "auto":  # DeepSpeed's default
            bucket = BUCKET
        parts = {
            "weights": self.all_weights(facts),
            "gradients": facts.trainable * (4 / n if self.stage > 1 else width),  # fp32 shards
            "optimizer state": facts.trainable * (ADAMW_BYTES + 4) / n,
            "communication buffers": bucket * width * (2.0 - is_3),
        }
        if is_3:
            parts["weights"] /= n
            most = max(LIVE_PARAMETERS, facts.block_experts)  # a layer's experts are one module
            parts["gathered weights"] = float(min(facts.parameters, most) * width)
        if self.offload_optimizer and not facts.on_host:
            parts |= {"gradients": 0.0, "optimizer state": 0.0}
        if self.offload_parameters and not facts.on_host:
            parts["weights"] = 0.0
        return parts

    def block_run(self, facts: Facts) -> BlockRun:
        return BlockRun(facts.is_half, casts=False, shared_by=1)

    def savings(self, facts: Facts) -> Iterator[Saving]:
        if facts.world_size > 1 and self.stage < 3:
            cost = ("same communication", "weights are gathered in every forward and backward")[
                self.stage - 1
            ]
            yield Saving(
                f"ZeRO stage {self.stage + 1}: {cost}.",
                {f"{ARGS}.stage": (self.stage, self.stage + 1)},
            )
        if not self.offload_optimizer:
            change = {f"{ARGS}.offload_optimizer": (False, True)}
            yield Saving(f"Optimizer state in host memory: {SLOWER}", change, is_on_host=True)

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Stages 1 and 2 all-reduce gradients, once or in every micro-batch, and gather parameters
        after the step. Stage 3 gathers what is not small where it is used."""
        n, width, m = facts.world_size, self.weight_bytes(facts), self.accumulation(facts)
        if self.stage < 3:
            yield Sent("all_reduce", (m if self.stage > 1 else 1) * facts.trainable, width, n, n)
            yield Sent("all_gather", facts.trainable, width, n, n)
            return
        gathers = m * (1 + (facts.parameters >= LIVE_PARAMETERS))
        yield Sent("all_gather", gathers * facts.parameters, width, n, n)
        yield Sent("reduce_scatter", m * facts.trainable, width, n, n)

    def allows(self, facts: Facts) -> bool:
        return self.stage < 3 or facts.checkpointing != "selective"

    def on_host(self, facts: Facts) -> tuple[float, float]:
        updated = facts.trainable / facts.world_size * self.offload_optimizer
        return updated, facts.parameters / facts.world_size * self.offload_parameters
