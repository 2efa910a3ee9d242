"""Plans saves of the distributed format so that rank 0's part does not grow with the number of
replicas.

By torch's planner every rank that holds a tensor sends its plan for it, in each save, and rank 0
drops the copies: with 4,096 ranks and DeepSeek-V3's 3,636 tensors that is 4 GB. Here one rank of
those that hold a shard plans to write it, by the tensor's name; plans are sent in the first save,
and then where one has changed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from lightning.pytorch.strategies import Strategy
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_numbers = count()
_of_training: WeakKeyDictionary[Strategy, type[OnceEach]] = WeakKeyDictionary()


def planner(strategy: Strategy) -> DefaultSavePlanner:
    """Returns a planner that caches plans for one training: torch does so by the name of the class,
    for all others."""
    kind = type(f"OnceEach{next(_numbers)}", (OnceEach,), {})
    return _of_training.setdefault(strategy, kind)(enable_plan_caching=True)


class OnceEach(DefaultSavePlanner):
    """Plans each shard on one of the ranks that hold it, and the optimizer's other values on one
    rank of the mesh."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        meshes = set()
        for value in self.state_dict.values():
            if isinstance(value, DTensor):
                meshes.add(value.device_mesh)
        largest = max(meshes, key=lambda mesh: (mesh.size(), str(mesh)), default=None)
        own = {}
        for name, value in self.state_dict.items():
            if _is_own(name, value, largest):
                own[name] = value
        self.state_dict = own
        self.mappings = {name: path for name, path in self.mappings.items() if name in own}

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        # a copy, which the writer empties; the cache keeps the other
        return plans, replace(metadata)


def _is_own(name: str, value: object, largest: DeviceMesh | None) -> bool:
    """Returns whether this rank writes a value. What remains double, as a pipeline's tied weights,
    rank 0 drops.

    Of the ranks with the same shard, the one whose coordinates along the mesh's replicated
    dimensions are the digits of the tensor's number writes it."""
    if isinstance(value, DTensor):
        number = _number(name)
        mesh = value.device_mesh
        replicated = [placement.is_replicate() for placement in value.placements]
    elif name.startswith("state_dict."):  # few; torch's planner sends them
        return True
    elif largest is None:
        return True
    else:
        # Settings and counts of steps are in one file, which all ranks read.
        number = 0
        mesh = largest
        replicated = [True] * mesh.ndim
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return True
    for place, size, is_replicated in zip(coordinate, mesh.shape, replicated, strict=True):
        if is_replicated:
            number, chosen = divmod(number, size)
            if chosen != place:
                return False
    return True


@cache
def _number(name: str) -> int:
    """Returns consecutive numbers for consecutive layers, so that consecutive replicas write
    them."""
    return crc32(re.sub(r"\d+", "", name).encode()) + sum(map(int, re.findall(r"\d+", name)))


class Writer(FileSystemWriter):
    """Empties the metadata once rank 0 has written it: torch sends it to all ranks, which do not
    read it."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        metadata.state_dict_metadata, metadata.planner_data, metadata.storage_data = {}, None, None
