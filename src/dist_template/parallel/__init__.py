"""Distributes a model over ranks.

place.py                      builds a model and lets the strategy shard it: the only interface
mesh.py, mesh_sizes.py        MeshStrategy: FSDP2, HSDP, tensor and expert parallelism
shard.py                      shards a model over its mesh
tensor_trial.py               finds what a tensor-parallel plan forgets
sequence.py                   sequence parallelism, in MeshStrategy
pipeline/                     its pipeline: division of a model, schedules
zero.py, zero_step.py         ZeroStrategy; deepspeed_config.py completes its DeepSpeed JSON
ddp.py                        defaults for Lightning's DDPStrategy
blocks.py, half.py            activation checkpointing, torch.compile; parameters in half precision
"""

from __future__ import annotations

from typing import Any


def data_parallel_size(strategy: Any, world_size: int) -> int:
    """Returns the number of ranks that read different batches under `strategy` on `world_size`
    ranks.

    Raises:
        InputError: the strategy's sizes do not fit this number.
    """
    return strategy.sizes(world_size).data_parallel if hasattr(strategy, "sizes") else world_size


def pipeline_of(strategy: Any) -> Any:
    """Returns the strategy's Pipeline, once the model is divided; None without one."""
    return getattr(strategy, "pipeline", None)


def random_rank(strategy: Any) -> int:
    """Returns the number of this rank's random stream: only tensor-parallel ranks share one."""
    if hasattr(strategy, "mesh_sizes"):
        return strategy.global_rank // strategy.mesh_sizes.tp
    return getattr(strategy, "distributed_sampler_kwargs", {"rank": 0})["rank"]
