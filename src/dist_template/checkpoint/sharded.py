"""Checkpoints of MeshStrategy: torch's distributed format, in which every rank writes its shards.

All tensors, including AdamW's moments, are named by parameter, so that any mesh can load another
mesh's checkpoint. Everything else (counters, callbacks, the position in the data) is in `meta.pt`,
as with Lightning's own strategy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from .. import weights
from ..compat.lightning import torch_optimizer
from ..compat.torch import tree_map
from .formats import (
    META,
    of_all_stages,
    refuse_other_shapes,
    refusing_unreadable,
    saved_shapes,
    shapes,
)
from .frozen import refuse_another_base
from .optimizer import ANEW, groups_of, without_moments
from .untrusted import DataReader, as_data

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # parameter groups differ between meshes


def optimizer_state(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Returns AdamW's moments by parameter name, each sharded like its parameter."""
    return get_optimizer_state_dict(module, torch_optimizer(optimizer), options=FLAT)


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes Lightning's `checkpoint` into the folder `path`. Collective."""
    write(*split(checkpoint), path)


def split(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors, which torch writes shard by shard, and the rest. Collective."""
    tensors = {"state_dict": checkpoint.pop("state_dict")}
    for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
        tensors[f"optimizer_{index}"] = state
    return _contiguous(tensors), checkpoint


def write(tensors: dict[str, Any], rest: dict[str, Any], path: Path, group: Any = None) -> None:
    """Writes both into the folder `path`. Collective over `group`; None: the default group.

    With a group, all tensors are in host memory."""
    writer = dcp.FileSystemWriter(path)
    if group is not None:  # nothing to copy ahead, which would wait on training's stream
        writer.per_thread_copy_ahead = 0
    dcp.save(tensors, storage_writer=writer, process_group=group)
    if weights.is_rank_zero():
        torch.save(rest, path / META)


def load(
    path: Path, module: nn.Module, optimizers: Iterable[Any], weights_only: bool | None
) -> dict[str, Any]:
    """Loads `path`, of any mesh, into `module` and `optimizers`; returns the rest. Collective."""
    with refusing_unreadable(path):
        rest = torch.load(path / META, weights_only=weights_only, map_location="cpu")
    refuse_another_base(path, rest, module)
    reads = not getattr(module, ANEW, False)
    optimizers = [torch_optimizer(optimizer) for optimizer in optimizers if reads]
    state: dict[str, Any] = {"state_dict": get_model_state_dict(module)}
    for index, optimizer in enumerate(optimizers):
        state[f"optimizer_{index}"] = optimizer_state(module, optimizer)
    with as_data(), refusing_unreadable(path):
        reader = DataReader(path)
        saved, own = saved_shapes(reader), shapes(state["state_dict"])
        refuse_other_shapes(path, saved, own if own == saved else of_all_stages(own))
        entries = set(reader.read_metadata().state_dict_metadata)
    for index, optimizer in enumerate(optimizers):
        prefix = f"optimizer_{index}"
        _drop_missing_moments(module, optimizer, state[prefix], f"{prefix}.", entries)
    loaded = _contiguous(state)
    with as_data(), refusing_unreadable(path):
        dcp.load(loaded, storage_reader=reader)
    state = tree_map(_as_placed, loaded, state)
    set_model_state_dict(module, state["state_dict"])
    for index, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(module, optimizer, state[f"optimizer_{index}"], options=FLAT)
    return rest


def _drop_missing_moments(
    module: nn.Module, optimizer: Any, state: dict[str, Any], prefix: str, entries: set[str]
) -> None:
    """Removes from `state` and `optimizer` the parameters that the checkpoint has no state of.

    Raises:
        InputError: the checkpoint's optimizer did not have one of the parameters.
    """
    saved: dict[str, set[str]] = {"state": set(), "param_groups": set()}
    for entry in state:
        if prefix + entry in entries:
            part, _, rest = entry.partition(".")
            saved[part].add(rest.rpartition(".")[0])
    groups = [{"params": saved["param_groups"]}]
    named = {"state": dict.fromkeys(saved["state"]), "param_groups": groups}
    missing = without_moments(named, groups_of(module, optimizer))
    parameters = dict(module.named_parameters())
    for name in missing:
        for field in optimizer.state.pop(parameters[name], {}):
            state.pop(f"state.{name}.{field}", None)


def _contiguous(state: Any) -> Any:
    """Returns `state` without strided shards, which torch 2.13 would write as if contiguous."""

    def contiguous(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return _place(value, [Shard(p.dim) if hasattr(p, "dim") else p for p in value.placements])

    return tree_map(contiguous, state)


def _as_placed(value: Any, reference: Any) -> Any:
    return _place(value, reference.placements) if isinstance(value, DTensor) else value


def _place(tensor: DTensor, placements: Any) -> DTensor:
    if tuple(placements) == tensor.placements:
        return tensor
    return tensor.redistribute(placements=placements)
