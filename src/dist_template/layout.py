"""Tensors with different device meshes or placements: groups them, and computes one norm over all
of them.

Under tensor or expert parallelism some parameters are plain tensors and others DTensors on
different meshes. torch's functions over lists (fused AdamW, `get_total_norm`, `clip_grad_norm_`)
refuse such a mixture, so they are called for one group at a time."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from .errors import InputError

__all__ = ["shard_of"]

PART = 2**15  # elements whose squares may be added one by one
T = TypeVar("T")


def layout(tensor: Tensor) -> Any:
    """Returns (mesh, placements), which must be equal in one call; None for a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def full_shape(tensor: Tensor) -> torch.Size:
    """Returns the unsharded shape: a ZeRO-3 parameter is empty and has its shape in `ds_shape`."""
    return getattr(tensor, "ds_shape", tensor.shape)


def local_shard(parameter: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor or of a ZeRO-3 parameter; any other tensor itself."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return getattr(parameter, "ds_tensor", parameter)


class Shard(NamedTuple):
    """A rank's part of a tensor."""

    values: Tensor
    # ranks of the same place hold the same values; "": not sharded; None: no two ranks do (ZeRO-3)
    place: str | None


def shard_of(tensor: Tensor) -> Shard:
    """Returns this rank's shard of a tensor of any layout, and its coordinate."""
    values = local_shard(tensor)
    if hasattr(tensor, "ds_tensor"):
        return Shard(values, None)
    if not isinstance(tensor, DTensor):
        return Shard(values, "")
    coordinate = tensor.device_mesh.get_coordinate() or []
    found = ""
    for index, placement in zip(coordinate, tensor.placements, strict=True):
        if not placement.is_replicate():
            found += f" {placement}:{index}"
    return Shard(values, found)


def refuse_unshardable(model: nn.Module, what: str) -> None:
    """Raises InputError if the strategy `what` cannot shard a parameter, or reduce its gradient."""
    refuse_lazy(model)
    kind, way_out = type(model).__name__, "set trainer.strategy to ddp"
    for name, parameter in model.named_parameters():
        if not full_shape(parameter):
            raise InputError(
                f"{name} of {kind} is a scalar parameter, which {what} cannot shard: give it one"
                f" dimension, nn.Parameter(torch.ones(1)), or {way_out}"
            )
        if parameter.is_complex():
            raise InputError(
                f"{name} of {kind} is a complex parameter, which {what} cannot shard: keep"
                f" torch.view_as_real of it as the parameter, or {way_out}"
            )
    for name, module in model.named_modules():
        owner, _, last = name.rpartition(".")
        if what == "FSDP2" and last == "_orig_mod":
            raise InputError(
                f"{owner} of {kind} is what torch.compile returns, and {what} saves its weights"
                f" under other names than it loads: compile it in place, self.{owner}.compile(),"
                f" or {way_out}"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(
                f"{name} of {kind} has sparse gradients, which {what} cannot reduce: make it with"
                f" sparse=False, or {way_out}"
            )


def refuse_mixed(model: nn.Module, units: Callable[[nn.Module], bool]) -> None:
    """Raises InputError if FSDP2 would have to gather trainable parameters of several dtypes, or
    one without elements, at once. It gathers those of a module that `units` is true of, without
    those of other such modules in it."""
    kind, found = type(model).__name__, dict[str, tuple[str, torch.dtype]]()
    unit_of = {"": ""}
    for name, module in model.named_modules():
        above = unit_of[name.rpartition(".")[0]]
        unit_of[name] = name if units(module) else above
        for own, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            if not parameter.numel():
                raise InputError(
                    f"{name}.{own} of {kind}".removeprefix(".")
                    + " is a parameter without elements,"
                    " which FSDP2 cannot reduce: remove it, or set trainer.strategy to ddp"
                )
            path = f"{name}.{own}".removeprefix(".")
            first, dtype = found.setdefault(unit_of[name], (path, parameter.dtype))
            if dtype != parameter.dtype:
                raise InputError(
                    f"{first} of {kind} is of {dtype} and {path} of {parameter.dtype}, which FSDP2"
                    " cannot gather together: give them one dtype, or set trainer.strategy to ddp"
                )


def refuse_lazy(model: nn.Module) -> None:
    """Raises InputError if a parameter has no shape yet: a checkpoint could not be loaded into it,
    and it could be neither sharded nor wrapped."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise InputError(
                f"{name} of {type(model).__name__} is of a lazy layer, which has no shape before"
                " the first batch: call the layers with a batch in the module's setup or"
                " configure_model, or give their sizes"
            )


def by_layout(
    items: Iterable[T], tensor: Callable[[Any], Tensor] = lambda item: item
) -> list[list[T]]:
    """Returns `items` in groups of equal layout of their `tensor`, in order of appearance."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        groups[layout(tensor(item))].append(item)
    return list(groups.values())


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Returns (): joint 2-norm of tensors of any layouts, equal on all ranks; no device sync."""
    norms = []
    for group in by_layout(tensors):
        parts: list[Tensor] = []
        for shard in map(local_shard, group):
            if shard.is_sparse:  # of an embedding, whose rows may be in it several times
                shard = shard.coalesce().values()
            # On a CPU torch (2.13) adds all squares of a tensor one by one, which loses 4e-4 of the
            # norm of 10 million.
            is_large = shard.is_cpu and shard.numel() > PART
            parts += shard.flatten().split(PART) if is_large else [shard]
        norm = torch.nn.utils.get_total_norm(parts)
        if isinstance(first := group[0], DTensor):
            square = norm.float().square()  # of offloaded gradients on the host; not in a DTensor
            for dimension, placement in enumerate(first.placements):
                if not placement.is_replicate():
                    of_dimension = first.device_mesh.get_group(dimension)
                    torch.distributed.all_reduce(square, group=of_dimension)
            norm = square.sqrt()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def joint_norm(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    """Returns () the joint 2-norm of all gradients; None where no parameter has one, because the
    strategy keeps and clips them itself (DeepSpeed)."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return total_norm(gradients) if gradients else None


def clip_by_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    norm_of: Callable[[list[nn.Parameter]], Tensor | None] = joint_norm,
) -> Tensor | None:
    """Scales all gradients in place to a joint 2-norm of at most `max_norm`; None or 0 measures it.
    Returns () the norm before clipping, on the gradients' device; or None, see `joint_norm`.

    Lightning's clipping (2.6.6) refuses a fused AdamW under bf16-mixed, does not return the norm,
    and fails for parameters on different meshes. `norm_of` returns the joint norm where other ranks
    have other parameters."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = norm_of(parameters)
    if norm is not None and max_norm:
        for group in by_layout(parameters, lambda p: p.grad):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm
