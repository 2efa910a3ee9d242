"""MeshStrategy: FSDP2, HSDP, tensor, expert, sequence and pipeline parallelism on one mesh.

spec.py       its configuration, before a start: the axes of the mesh, put together
axes/         one class for each axis: what it refuses, needs and sends
sizes.py      the sizes of the axes on a number of ranks
plans.py      what transformers' plans say of a mesh
strategy.py   MeshStrategy; ranks.py has its processes
shard.py      shards a model over the mesh
sequence.py   ranks that share sequences
pipeline/     stages, schedules, the training step
format.py     its checkpoints; planning.py divides the writing of them"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Run folders and checkpoints name the class by this package; it imports torch."""
    if name == "MeshStrategy":
        from .strategy import MeshStrategy

        return MeshStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
