"""The format of MeshStrategy: torch's distributed format, in which every rank writes its shards.

All tensors, including AdamW's moments, are named by parameter, so that any mesh can load another
mesh's checkpoint. Everything else (counters, callbacks, the position in the data) is in `meta.pt`,
as with Lightning's own strategy."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    LoadPlan,
)
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim import Optimizer

from ... import processes
from ...checkpoint.formats import StrategyFormat
from ...checkpoint.optimizer import State, by_name_from_flat, groups_of, merge, without_moments
from ...checkpoint.plain_types import back, plain
from ...checkpoint.protocol import FLAT, Checkpoint, Copy, Group, Opened, Shapes
from ...checkpoint.stored import Box, Stored, copy_shard, is_scalar
from ...checkpoint.untrusted import DataReader, agreed_on_errors, reading
from ...compat.lightning import torch_optimizer
from ...compat.torch import read_unsharded, tree_map
from .planning import Writer, planner

Place = Callable[[DTensor, Sequence[Placement]], DTensor]
META = "meta.pt"  # Lightning's name for the part of a distributed checkpoint that is not tensors


class ShardedFormat(StrategyFormat[ModelParallelStrategy]):
    written_by = "MeshStrategy"
    of_lightning = "ModelParallelStrategy"

    @staticmethod
    def is_at(path: Path) -> bool:
        return (path / ".metadata").is_file() and (path / META).is_file()

    @staticmethod
    def header(path: Path, weights_only: bool | None) -> tuple[Checkpoint, Shapes]:
        with reading(path, ShardedFormat.written_by, trusted=weights_only is False):
            rest = torch.load(path / META, weights_only=weights_only, map_location="cpu")
            entries = DataReader(path).read_metadata().state_dict_metadata
        shapes = {}
        for name, entry in entries.items():
            if name.startswith("state_dict.") and isinstance(entry, TensorStorageMetadata):
                shapes[name.removeprefix("state_dict.")] = tuple(entry.size)
        return rest, shapes

    @staticmethod
    def read(path: Path, optimizer: bool) -> Checkpoint:
        stored: Checkpoint = {}
        rest = set[str]()
        with reading(path, ShardedFormat.written_by):
            reader = DataReader(path)
            metadata = reader.read_metadata()  # first: torch would log a refusal with a stack trace
            for name, entry in metadata.state_dict_metadata.items():
                part, _, key = name.partition(".")
                if not (optimizer or part == "state_dict"):
                    continue
                if isinstance(entry, TensorStorageMetadata) and entry.size:
                    dtype = entry.properties.dtype
                    stored.setdefault(part, {})[key] = Chunked(
                        tuple(entry.size), dtype, name, entry, reader
                    )
                else:
                    rest.add(name)
            for part, values in read_unsharded(reader, rest).items():
                stored[part] = values | stored.get(part, {})
            checkpoint = torch.load(path / META, map_location="cpu")
        checkpoint["state_dict"] = _unpacked(stored.pop("state_dict"))
        for index in range(len(stored)):
            state = by_name_from_flat(stored[f"optimizer_{index}"], checkpoint["state_dict"])
            checkpoint.setdefault("optimizer_states", []).append(state)
        return checkpoint

    def save(self, checkpoint: Checkpoint, path: Path) -> None:
        write(*_split(checkpoint), path, planner=planner(self.strategy))

    def stage(self, checkpoint: Checkpoint, copy: Copy, group: Group) -> Callable[[Path], object]:
        tensors, rest = _split(checkpoint)
        copied = copy({"tensors": tensors, "rest": rest})
        return lambda folder: write(
            copied["tensors"], copied["rest"], folder, group, planner(self.strategy)
        )

    def needed(self, path: Path, parts: set[str]) -> set[str]:
        """Returns the files with chunks of this rank's shards: a parameter's moments have its
        layout."""
        if not self.is_at(path):
            return parts
        tensors = _contiguous(
            get_model_state_dict(cast(nn.Module, self.strategy.model)), _without_values
        )
        with reading(path, self.written_by):
            metadata = DataReader(path).read_metadata()
        wanted = {}
        for entry, stored in metadata.state_dict_metadata.items():
            part, _, name = entry.partition(".")
            if part != "state_dict":  # state.PARAMETER.MOMENT, param_groups.PARAMETER.SETTING
                name = name.partition(".")[2].rpartition(".")[0]
            if name in tensors:
                shape = getattr(stored, "size", ())
                is_sharded = shape == getattr(tensors[name], "shape", None)
                wanted[entry] = tensors[name] if is_sharded else torch.empty(shape, device="meta")
        plan = create_default_local_load_plan(wanted, metadata)
        return {metadata.storage_data[item.storage_index].relative_path for item in plan.items}

    def reads(self, opened: Opened) -> bool:
        return opened.format is ShardedFormat

    def load_own(self, opened: Opened) -> Checkpoint:
        """Loads a checkpoint of any mesh: torch reads the parts that each rank needs."""
        module = cast(nn.Module, self.strategy.model)
        optimizers = []
        if opened.with_optimizer:
            optimizers = [torch_optimizer(each) for each in self.strategy.optimizers]
        state_dict: Checkpoint = dict(get_model_state_dict(module))
        state: Checkpoint = {"state_dict": state_dict}
        for index, optimizer in enumerate(optimizers):
            state[f"optimizer_{index}"] = self.strategy.optimizer_state(optimizer)
        with agreed_on_errors(), reading(opened.path, self.written_by), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            reader = DataReader(opened.path)
            entries = set(reader.read_metadata().state_dict_metadata)
            for index, optimizer in enumerate(optimizers):
                prefix = f"optimizer_{index}"
                _drop_missing_moments(module, optimizer, state[prefix], prefix, entries)
            _prepare_extra_states(state_dict, entries)
            loaded = _contiguous(state)
            # A rank's plan depends on no other's: torch would send all to rank 0 and back, 1 MB
            # each.
            dcp.load(loaded, storage_reader=reader, no_dist=True)
            state = tree_map(_placed_like, loaded, state)
            own = _unpacked(state["state_dict"])
        strict = StateDictOptions(strict=getattr(module, "strict_loading", True))
        set_model_state_dict(module, own, options=strict)
        for index, optimizer in enumerate(optimizers):
            set_optimizer_state_dict(module, optimizer, state[f"optimizer_{index}"], options=FLAT)
        return opened.metadata

    def set_optimizer_state(self, stored_weights: Mapping[str, Any], states: list[State]) -> None:
        module = cast(nn.Module, self.strategy.model)
        for state, optimizer in zip(states, self.strategy.optimizers, strict=False):
            groups = groups_of(module, optimizer)
            missing = without_moments(state, groups)
            self.strategy.optimizer_state(optimizer)  # creates moments, as torch's first step does
            parameters: dict[str, nn.Parameter] = {}  # in a pipeline, of this rank's stages
            for names, group in zip(groups, optimizer.param_groups, strict=True):
                group.update(merge(state, names, group))
                parameters |= zip(names, group["params"], strict=True)
            for name in missing:
                optimizer.state.pop(parameters[name], None)
            for name, parameter in parameters.items():
                for key, value in state["state"].get(name, {}).items():
                    shard = optimizer.state[parameter][key]
                    if is_scalar(value):
                        shard.copy_(value)
                    else:
                        copy_shard(shard, value)


@dataclass
class Chunked(Stored):
    """A tensor of torch's distributed format: reads the chunks that overlap a box."""

    name: str
    entry: TensorStorageMetadata
    reader: FileSystemReader

    def read(self, box: Box) -> Tensor:
        offsets, sizes = zip(*((start, end - start) for start, end in box), strict=True)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        result = torch.empty(sizes, dtype=self.dtype)
        if result.numel():
            items = create_read_items_for_chunk_list(self.name, self.entry, [chunk])
            self.reader.read_data(LoadPlan(items), _Into(result))
        return result


class _Into(DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.result


def write(
    tensors: Checkpoint,
    rest: Checkpoint,
    path: Path,
    group: Group = None,
    planner: DefaultSavePlanner | None = None,
) -> None:
    """Writes both into the folder `path`. Collective over `group`, with which all are in host
    memory."""
    writer = Writer(path)
    if group is not None:  # nothing to copy ahead, which would wait on training's stream
        writer.per_thread_copy_ahead = 0
    dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
    if processes.is_rank_zero():
        torch.save(rest, path / META)


def _split(checkpoint: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Returns the tensors, which torch writes shard by shard, and the rest. Collective."""
    state_dict = checkpoint.pop("state_dict")
    tensors = {"state_dict": {name: _packed(value) for name, value in state_dict.items()}}
    for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
        tensors[f"optimizer_{index}"] = state
    return _contiguous(tensors), checkpoint


def _packed(value: object) -> object:
    """Returns a module's extra state as bytes: torch would write each of its parts under a name of
    its own, and could not load it into a module whose state has other parts."""
    if isinstance(value, Tensor):
        return value
    content = BytesIO()
    torch.save(plain(value, ("state_dict",)), content)
    return content.getvalue()


def _prepare_extra_states(state_dict: Checkpoint, entries: set[str]) -> None:
    """Lets torch read the extra states that a checkpoint with `entries` has."""
    for name in [name for name, value in state_dict.items() if not isinstance(value, Tensor)]:
        if f"state_dict.{name}" in entries:
            state_dict[name] = b""
        elif not any(entry.startswith(f"state_dict.{name}.") for entry in entries):
            del state_dict[name]  # `load_state_dict` decides whether it may be missing
        # else an earlier version wrote its parts


def _unpacked(state_dict: Checkpoint) -> Checkpoint:
    return {
        name: back(torch.load(BytesIO(value), map_location="cpu"))
        if isinstance(value, bytes)
        else value
        for name, value in state_dict.items()
    }


def _drop_missing_moments(
    module: nn.Module, optimizer: Optimizer, state: State, prefix: str, entries: set[str]
) -> None:
    """Removes parameters without state in the checkpoint from `state` and `optimizer`."""
    saved: dict[str, set[str]] = {"state": set(), "param_groups": set()}
    for entry in state:
        if f"{prefix}.{entry}" in entries:
            part, _, rest = entry.partition(".")
            saved[part].add(rest.rpartition(".")[0])
    named = {"state": saved["state"], "param_groups": [{"params": saved["param_groups"]}]}
    parameters = dict(module.named_parameters())
    for name in without_moments(named, groups_of(module, optimizer)):
        for field in optimizer.state.pop(parameters[name], {}):
            state.pop(f"state.{name}.{field}", None)


def _contiguous(state: Checkpoint, place: Place | None = None) -> Checkpoint:
    """Returns `state` without strided shards, which torch 2.13 would write as if contiguous."""

    def contiguous(value: object) -> object:
        if not isinstance(value, DTensor):
            return value
        placements = list(value.placements)
        for index, placement in enumerate(placements):
            if isinstance(dim := getattr(placement, "dim", None), int):
                placements[index] = Shard(dim)
        return (place or _place)(value, placements)

    return tree_map(contiguous, state)


def _without_values(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    empty = torch.empty(0, device="meta")
    return DTensor.from_local(
        empty, tensor.device_mesh, placements, shape=tensor.shape, stride=tensor.stride()
    )


def _placed_like(value: object, reference: object) -> object:
    if isinstance(value, DTensor) and isinstance(reference, DTensor):
        return _place(value, reference.placements)
    return value


def _place(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    if tuple(placements) == tensor.placements:
        return tensor
    return tensor.redistribute(placements=placements)
