"""Strategies of Lightning's own, one device and DDP first."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...errors import InputError
from ..configured import Configured

# Lightning's strategies without support for CPUs or for transformers' plans, and files in their
# place
OF_MESH = "fsdp2, hsdp, fsdp2_tp or tp"
REPLACED = {"deepspeed": "zero2 or zero3", "fsdp": OF_MESH, "modelparallel": OF_MESH}
ROW_BYTES = 16


@dataclass(frozen=True)
class Plain:
    """A strategy under which each rank has the full model, and its own batches."""

    arguments: Mapping[str, Any] = field(default_factory=dict)  # trainer.strategy.init_args
    name: str = "ddp"  # Lightning's name of the strategy, or its class
    bases: tuple[str, ...] = ()  # names of that class and its base classes

    is_replicated: ClassVar[bool] = True
    precisions: ClassVar[tuple[str, ...]] = ()  # that the strategy supports; (): all

    def data_parallel(self, world_size: int) -> int:
        """Returns the number of ranks that read different batches. Raises InputError for sizes that
        do not fit."""
        return world_size

    def rows_together(self, world_size: int, micro_batch_size: int) -> int:
        """Returns the rows that an optimizer step has at least; it has a multiple of them."""
        return micro_batch_size * self.data_parallel(world_size)

    def axes(self, world_size: int) -> list[str]:
        """Returns the dimensions of the sharding that are above one, as proof.json names them."""
        return ["ddp"] if world_size > 1 else []

    def expert_parts(self, world_size: int) -> int:
        """Returns over how many ranks the width of each expert is divided."""
        return 1

    def reduced(self) -> tuple[dict[str, Any], list[str]]:
        """Returns the arguments for a rehearsal, and a sentence for each difference from
        production."""
        return dict(self.arguments), []

    def refusals(self, setup: Configured) -> Iterator[str]:
        """Yields a sentence for each thing of `setup` that cannot work."""
        given = setup.machine.precision
        if self.precisions and given not in self.precisions:
            choice = f"{', '.join(self.precisions[:-1])} or {self.precisions[-1]}"
            yield f"trainer.precision {given!r} does not exist under {self.name}: set {choice}"
        if setup.setting("blocks.compile"):
            yield from measured_refusal(
                setup, "model.blocks.compile", "whose first steps compile and are no measure"
            )
        yield from self._widths_of_experts(setup)
        if not self.is_replicated:
            return
        for start, files in REPLACED.items():
            if any(name.lower().startswith(start) for name in (self.name, *self.bases)):
                yield f"trainer.strategy {self.name!r} is replaced: use --config strategy/{files}"
                return
        if any(word in self.name for word in ("spawn", "fork", "notebook")):
            yield (
                f"trainer.strategy {self.name!r} is not supported, because it pickles the module:"
                " set ddp"
            )

    def _widths_of_experts(self, setup: Configured) -> Iterator[str]:
        """The experts' grouped products (torch 2.13) need rows of a multiple of 16 bytes."""
        from ...compat.transformers import fields_of_experts  # it imports torch

        config = setup.text_config
        if config is None or not (fields := fields_of_experts(config)):
            return
        try:
            parts = self.expert_parts(setup.machine.world_size)
        except InputError:
            return  # of sizes that do not fit, which the strategy reports
        bits = re.findall(r"16|32|64", setup.machine.precision)
        multiple = ROW_BYTES * 8 // int(bits[0] if bits else 32)
        for name, number in ((fields.width, parts), (fields.hidden, 1)):
            size = getattr(config, name, None)
            if not isinstance(size, int) or size % (multiple * number) == 0:
                continue
            shared = f" x {number} ranks that share an expert" if number > 1 else ""
            yield (
                f"model.architecture.{name} {size} is not a multiple of {multiple * number}, which"
                f" grouped products of experts need ({multiple} numbers fill {ROW_BYTES} bytes at"
                f" trainer.precision {setup.machine.precision}{shared}): edit it"
            )
            return


def selective_refusal(setup: Configured, what: str) -> Iterator[str]:
    """Refuses selective checkpointing of blocks that communicate (torch 2.13: "not found in
    storage" in backward)."""
    if setup.setting("blocks.checkpointing") == "selective":
        why = f"{what}, which communicates inside of a block again in backward"
        yield f"model.blocks.checkpointing 'selective' does not work with {why}: set full"


def measured_refusal(
    setup: Configured,
    what: str,
    why: str = "where ranks wait for each other inside of a forward pass",
) -> Iterator[str]:
    """Refuses to measure the ranks' speeds where a rank's own time cannot be told."""
    if getattr(setup.data, "rank_speeds", None) == "measured":
        yield (
            f"data.rank_speeds measured does not work with {what}, {why}: give a number for each"
            " data-parallel rank"
        )
