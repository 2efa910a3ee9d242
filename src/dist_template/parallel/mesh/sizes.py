"""The sizes of a mesh's axes on a number of ranks. No torch."""

from collections.abc import Mapping
from math import prod
from typing import Any

from ...errors import InputError
from ..configured import ARGS
from .axes import all_axes
from .axes.axis import Axis, MeshSizes, Size

EDIT = f"edit {ARGS}"
Arguments = Mapping[str, Any]  # of MeshStrategy, with the sizes by `Axis.key`


def given_size(arguments: Arguments, axis: type[Axis]) -> Size:
    """Returns the size of `axis` in the arguments of MeshStrategy. Raises InputError if it is no
    size: nothing else checks that of a package's axis."""
    size = arguments.get(axis.key, axis.default)
    if size != "auto" and (isinstance(size, bool) or not isinstance(size, int)):
        raise InputError(f"{axis.key} is {size!r}; give 1 or more, or auto: {EDIT}")
    return size


def sizes_of(arguments: Arguments, world_size: int) -> MeshSizes:
    """Returns the sizes on `world_size` ranks, with "auto" resolved. Raises InputError if their
    product is not the number of ranks, more than one is "auto", or cp_size does not divide
    fsdp_size."""
    sizes, adding = MeshSizes(), [axis for axis in all_axes() if axis.adds_ranks]
    for axis in adding:
        if (size := given_size(arguments, axis)) != "auto":
            sizes[axis.name] = size
    automatic = [axis.name for axis in adding if axis.name not in sizes]
    if len(automatic) == 1:
        sizes[automatic[0]] = world_size // max(1, prod(sizes.values()))
    if len(automatic) > 1 or min(sizes.values()) < 1 or prod(sizes.values()) != world_size:
        product = " x ".join(f"{axis.key} {given_size(arguments, axis)}" for axis in adding)
        processes = f"{world_size}, the number of processes (trainer.devices x trainer.num_nodes)"
        way_out = f"{EDIT}, where only one size can be auto"
        raise InputError(f"{product} does not make {processes}; {way_out}")
    for axis in all_axes():
        if not axis.adds_ranks:
            given = given_size(arguments, axis)
            sizes[axis.name] = sizes.fsdp * sizes.tp if given == "auto" else given
            if sizes[axis.name] < 1:
                raise InputError(f"{axis.key} is {given}; give 1 or more, or auto: {EDIT}")
    if sizes.fsdp % sizes.cp:
        raise InputError(f"cp_size {sizes.cp} must divide fsdp_size {sizes.fsdp}: {EDIT}")
    return sizes


def data_parallel_size(sizes: MeshSizes) -> int:
    """Returns the number of ranks, or groups of them, that read different batches."""
    own = prod(sizes[axis.name] for axis in all_axes() if axis.reads_own_rows)
    return own // sequence_parts(sizes)


def sequence_parts(sizes: MeshSizes) -> int:
    """Returns over how many ranks each sequence is divided."""
    return prod(sizes[axis.name] for axis in all_axes() if axis.shares_sequences)
