"""The sizes of MeshStrategy's mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from ..errors import InputError

Size = int | Literal["auto"]
ADDING = ("pp_size", "dp_replicate_size", "fsdp_size", "tp_size")  # their product is all ranks


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each dimension; `ep` divides fsdp x tp, `cp` divides fsdp: both add no ranks."""

    dp_replicate: int
    fsdp: int
    tp: int
    ep: int
    cp: int = 1
    pp: int = 1

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different batches."""
        return self.dp_replicate * self.fsdp // self.cp

    @classmethod
    def of(cls, given: Mapping[str, Size], world_size: int) -> MeshSizes:
        """Returns the sizes on `world_size` ranks, with "auto" resolved.

        Raises:
            InputError: their product is not the number of ranks, more than one is "auto", or
                cp_size does not divide fsdp_size.
        """
        numbers = {name: size for name in ADDING if (size := given[name]) != "auto"}
        automatic = [name for name in ADDING if name not in numbers]
        if len(automatic) == 1:
            numbers[automatic[0]] = world_size // max(1, prod(numbers.values()))
        if len(automatic) > 1 or min(numbers.values()) < 1 or prod(numbers.values()) != world_size:
            product = " x ".join(f"{name} {given[name]}" for name in ADDING)
            raise InputError(
                f"{product} does not make {world_size}, the number of processes (trainer.devices x"
                " trainer.num_nodes); edit strategy.init_args, where only one size can be auto"
            )
        pp, replicate, fsdp, tp = (numbers[name] for name in ADDING)
        cp, ep = given["cp_size"], given["ep_size"]
        if cp == "auto" or cp < 1 or fsdp % cp:
            raise InputError(f"cp_size {cp} must divide fsdp_size {fsdp}: edit cp_size")
        return cls(replicate, fsdp, tp, fsdp * tp if ep == "auto" else ep, cp, pp)
