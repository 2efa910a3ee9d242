"""The axes of MeshStrategy's mesh, outermost first, and their sizes on a number of ranks.

    dense parameters    (pp, dp_replicate, fsdp, tp)
    experts             (pp, dp_replicate, efsdp, ep),  efsdp = fsdp x tp / ep
    sequences           cp neighbours along fsdp share each sequence

spec.py has the refusals of these axes, estimate.py their memory and messages. An axis
of another package is one class with all of it, which the package appends to `AXES`."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Literal

from ...errors import InputError

Size = int | Literal["auto"]
Arguments = Mapping[str, Any]  # of MeshStrategy, with the sizes by `Axis.key`


class MeshSizes(dict[str, int]):
    """Ranks along each axis, by its name: `sizes.tp` is `sizes["tp"]`."""

    pp: int
    dp_replicate: int
    fsdp: int
    tp: int
    ep: int
    cp: int

    def __getattr__(self, name: str) -> int:
        return self[name]


class Axis:
    """A dimension of a mesh, of a size above 1."""

    name = key = ""  # of the dimension; of its size, NAME_size
    default: Size = 1
    adds_ranks = True  # whether its size is a factor of the number of ranks
    reads_own_rows = False  # whether ranks that differ only here read different batches
    draws_own = True  # whether they have random streams of their own (dropout)
    is_proven = True  # whether proof.json has it; replicas compute what one process computes

    def __init_subclass__(cls) -> None:
        cls.key = f"{cls.name}_size"

    def __init__(self, sizes: MeshSizes) -> None:
        self.sizes, self.size = sizes, sizes[self.name]

    def refusals(self, setup: Any) -> Iterator[str]:
        """Yields a sentence for each thing of `setup` that cannot work."""
        return iter(())

    def share(self, facts: object) -> float:
        """Returns the share of the parameters that a rank stores."""
        return 1.0

    def buffers(self, facts: Any) -> dict[str, float]:
        """Returns bytes of a rank besides its shards, by part."""
        return {}

    def traffic(self, facts: Any) -> Iterator[Any]:
        """Yields what a rank sends in an optimizer step."""
        return iter(())


class PipelineAxis(Axis):
    """Each rank has some consecutive blocks."""

    name = "pp"


class ReplicaAxis(Axis):
    """HSDP: replicas of what fsdp shards."""

    name = "dp_replicate"
    reads_own_rows, is_proven = True, False


class ShardAxis(Axis):
    """FSDP2: parameters are gathered where they are used, and gradients reduce-scattered."""

    name, default = "fsdp", "auto"
    reads_own_rows = True


class TensorAxis(Axis):
    """Tensor parallelism: ranks share each matrix product, by the model's plan."""

    name = "tp"
    draws_own = False


class ExpertAxis(Axis):
    """Expert parallelism: ranks hold different experts."""

    name = "ep"
    adds_ranks = False


class SequenceAxis(Axis):
    """Sequence parallelism: neighbours along fsdp share each sequence."""

    name = "cp"
    adds_ranks = False


AXES: list[type[Axis]] = [
    PipelineAxis,
    ReplicaAxis,
    ShardAxis,
    TensorAxis,
    ExpertAxis,
    SequenceAxis,
]


def given_size(arguments: Arguments, axis: type[Axis]) -> Size:
    """Returns the size of `axis` in the arguments of MeshStrategy."""
    return arguments.get(axis.key, axis.default)


def sizes_of(arguments: Arguments, world_size: int) -> MeshSizes:
    """Returns the sizes on `world_size` ranks, with "auto" resolved. Raises InputError if their
    product is not the number of ranks, more than one is "auto", or cp_size does not divide
    fsdp_size."""
    sizes, adding = MeshSizes(), [axis for axis in AXES if axis.adds_ranks]
    for axis in adding:
        if (size := given_size(arguments, axis)) != "auto":
            sizes[axis.name] = size
    automatic = [axis.name for axis in adding if axis.name not in sizes]
    if len(automatic) == 1:
        sizes[automatic[0]] = world_size // max(1, prod(sizes.values()))
    if len(automatic) > 1 or min(sizes.values()) < 1 or prod(sizes.values()) != world_size:
        product = " x ".join(f"{axis.key} {given_size(arguments, axis)}" for axis in adding)
        processes = f"{world_size}, the number of processes (trainer.devices x trainer.num_nodes)"
        way_out = "edit strategy.init_args, where only one size can be auto"
        raise InputError(f"{product} does not make {processes}; {way_out}")
    for axis in AXES:
        if not axis.adds_ranks:
            given = given_size(arguments, axis)
            sizes[axis.name] = sizes.fsdp * sizes.tp if given == "auto" else given
    if min(sizes.cp, sizes.ep) < 1 or sizes.fsdp % sizes.cp:
        which = (
            f"cp_size {sizes.cp} must divide fsdp_size {sizes.fsdp}, and ep_size {sizes.ep} be 1"
            " or more"
        )
        raise InputError(f"{which}: edit strategy.init_args")
    return sizes


def data_parallel_size(sizes: MeshSizes) -> int:
    """Returns the number of ranks, or groups of them, that read different batches."""
    return prod(sizes[axis.name] for axis in AXES if axis.reads_own_rows) // sizes.cp
