"""Plays thousands of ranks in one process: rank 0 of collectives, a sharded model's state."""

import pickle
from collections.abc import Callable
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard


class RankZero:
    """Inside, this process is rank 0 of `num` ranks, whose answers in a collective of objects are
    what `of(rank 0's value, rank)` returns. `bytes` counts what rank 0 sends and receives."""

    def __init__(self, num: int, of: Callable[[Any, int], Any] = lambda value, rank: value) -> None:
        self.num, self.of, self.bytes = num, of, 0
        here: dict[str, Any] = {"is_initialized": lambda: True, "get_rank": lambda group=None: 0}
        here |= {"get_world_size": lambda group=None: num, "gather_object": self.gather}
        here |= {"all_gather_object": lambda values, value, group=None: self.gather(value, values)}
        self.patch = patch.multiple(dist, broadcast_object_list=self.broadcast, **here)

    def __enter__(self) -> Self:
        self.patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.stop()

    def gather(self, value: Any, values: list[Any], **_: Any) -> None:
        for rank in range(self.num):
            text = pickle.dumps(self.of(value, rank))
            self.bytes += len(text)
            values[rank] = pickle.loads(text)

    def broadcast(self, values: list[Any], **_: Any) -> None:
        self.bytes += len(pickle.dumps(values))  # the others pass it on


def state_of(parameters: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, Any]:
    """Returns the flat state of replicas and shards: weights, AdamW's moments, steps, settings."""
    state: dict[str, Any] = {}
    for name, parameter in parameters.items():
        rows = -(-len(parameter) // mesh.size(1))
        local = torch.empty(rows, *parameter.shape[1:], device="meta")
        shape: Any = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
        tensor = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], **shape)
        state[f"state_dict.{name}"], moments = tensor, f"optimizer_0.state.{name}"
        state |= {f"{moments}.{each}": tensor for each in ("exp_avg", "exp_avg_sq")}
        state[f"{moments}.step"] = torch.tensor(0.0)
        for setting in torch.optim.AdamW([local]).defaults:
            state[f"optimizer_0.param_groups.{name}.{setting}"] = 0
    return state
