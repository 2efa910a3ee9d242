"""Distributes a model over ranks.

place.py          builds a model and lets the strategy shard it: the only interface
starting.py       starting weights, made by ranks in turns; scatter.py sends every rank its shards
own_format.py     saves and loads checkpoints of MeshStrategy and ZeroStrategy
run_strategy.py   what every strategy answers on a rank of a training
mesh_sizes.py     the axes of a mesh, and their sizes
mesh.py           MeshStrategy: FSDP2, HSDP, tensor and expert parallelism
shard.py          shards a model over its mesh
sequence.py       sequence parallelism, in MeshStrategy
pipeline/         its pipeline: division of a model, schedules
zero.py           ZeroStrategy; deepspeed_config.py completes its DeepSpeed JSON
blocks.py         activation checkpointing, torch.compile
half.py           parameters in half precision

Beside the strategies, which import none of it, by their configurations alone:

answers/          ranks and refusals, for `fit`; configured.py is what they read
estimates/        memory, messages and time, for `plan` and the diagnosis
shrunk.py         a few processes, for `rehearse`"""

from .run_strategy import run_strategy

__all__ = ["run_strategy"]
