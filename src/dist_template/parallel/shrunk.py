"""A strategy on a few processes, for `rehearse`."""

from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

from .mesh.pipeline.stages import stages_per_rank
from .mesh.sizes import AXES, Size, data_parallel_size, given_size, sizes_of
from .mesh.spec import Mesh
from .spec import sharding_of

__all__ = ["shrunk"]

MOST = 4  # processes of a rehearsal


@dataclass(frozen=True)
class Small:
    """A strategy on a few processes: its `init_args`, ranks, and those with batches of their own;
    stages of a pipeline; a sentence for each difference from production."""

    arguments: dict[str, Any]
    processes: int
    data_parallel: int
    stages: int = 1
    notes: list[str] = field(default_factory=list)


def shrunk(strategy: Any, processes: int | None = None) -> Small:
    """Returns the reduced form of a strategy on `processes`; None: as few as keep each kind of
    parallelism, at most 4. Raises InputError if the number does not fit."""
    sharding = sharding_of(strategy)
    if isinstance(sharding, Mesh):
        return _small_mesh(sharding, processes)
    arguments, notes = sharding.reduced()
    return Small(arguments, processes or 2, processes or 2, notes=notes)


def _small_mesh(mesh: Mesh, processes: int | None) -> Small:
    """Reduces sizes above 1 to 2. If that needs too many processes, data parallelism becomes 1
    first, and then others."""
    arguments, stages, notes = dict(mesh.arguments), 1, []
    adding = [axis for axis in AXES if axis.adds_ranks]
    sizes: dict[str, Size] = {}
    for axis in adding:
        sizes[axis.key] = given_size(arguments, axis)
        if sizes[axis.key] not in (1, "auto"):
            sizes[axis.key] = 2
    for axis in sorted(
        reversed(adding), key=lambda axis: (not axis.reads_own_rows, axis.name == "fsdp")
    ):
        key = axis.key
        if _ranks(sizes) > (processes or MOST) and sizes[key] != 1:
            sizes[key] = 1
            notes.append(f"{key} is 1: the mesh would need more processes")
    num = processes or _ranks(sizes)
    arguments |= sizes | {"ep_size": 1, "cp_size": 1}
    resolved = sizes_of(arguments, num)  # raises if the number does not fit
    ranks, given = resolved.fsdp * resolved.tp, mesh.arguments.get("ep_size", 1)
    arguments["ep_size"] = given if given == "auto" else min(given, 2, ranks)
    arguments["cp_size"] = gcd(mesh.arguments.get("cp_size", 1), resolved.fsdp)
    if resolved.pp > 1:
        arguments["pp_stages_per_rank"] = min(mesh.pp_stages_per_rank, 2)
        stages = 2 * stages_per_rank(mesh.pp_schedule, arguments["pp_stages_per_rank"])
        if isinstance(mesh.pp_layers, list):
            arguments["pp_layers"] = "even"
            notes.append("pp_layers is even: the small model has fewer blocks")
    return Small(arguments, num, data_parallel_size(sizes_of(arguments, num)), stages, notes)


def _ranks(sizes: dict[str, Size]) -> int:
    return prod(2 if size == "auto" else size for size in sizes.values())
