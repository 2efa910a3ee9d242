"""Strategies of Lightning's own, one device and DDP first."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..configured import ARGS, Configured
from .base import SLOWER, Spec
from .facts import Facts, Saving, Sent

# Lightning's strategies without support for CPUs or for transformers' plans, and files in their
# place
OF_MESH = "fsdp2, hsdp, fsdp2_tp or tp"
REPLACED = {"deepspeed": "zero2 or zero3", "fsdp": OF_MESH, "modelparallel": OF_MESH}
FSDP2, ZERO_2 = "strategy/fsdp2", "strategy/zero2"
FILES: dict[str, dict[str, Any]] = {  # what `savings` proposes in place of DDP
    FSDP2: {"class_path": "MeshStrategy"},
    ZERO_2: {"class_path": "ZeroStrategy", "init_args": {"stage": 2}},
}


@dataclass(frozen=True)
class PlainSpec(Spec):
    """A strategy under which each rank has the full model, and its own batches."""

    name: str = "ddp"

    is_replicated: ClassVar[bool] = True

    def why_not_manual(self, world_size: int) -> str:
        return ""

    def refusals(self, setup: Configured) -> Iterator[str]:
        yield from super().refusals(setup)
        for start, files in REPLACED.items():
            if any(name.lower().startswith(start) for name in (self.name, *self.bases)):
                yield f"trainer.strategy {self.name!r} is replaced: use --config strategy/{files}"
                return
        if any(word in self.name for word in ("spawn", "fork", "notebook")):
            yield (
                f"trainer.strategy {self.name!r} is not supported, because it pickles the module:"
                " set ddp"
            )

    def buffers(self, facts: Facts) -> dict[str, float]:
        """Without an accumulation, DDP's gradients are its buffers."""
        if self.data_parallel(facts.world_size) == 1 or self.accumulation(facts) == 1:
            return {}
        return {"communication buffers": facts.trainable * self.weight_bytes(facts)}

    def savings(self, facts: Facts) -> Iterator[Saving]:
        if facts.world_size > 1 and facts.precision != "16-mixed":  # which a mesh does not support
            sentence = "FSDP2: each rank keeps a shard, and gathers a block when it runs."
            yield Saving(sentence, {"config": ("ddp", FSDP2)})
        sentence = f"ZeRO stage 2 with optimizer state in host memory: {SLOWER}"
        changes = {"config": ("ddp", ZERO_2), f"{ARGS}.offload_optimizer": (None, True)}
        yield Saving(sentence, changes, is_on_host=True)

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Gradients, once in a step."""
        n = self.data_parallel(facts.world_size)
        yield Sent("all_reduce", facts.trainable, self.weight_bytes(facts), n, span=n)
