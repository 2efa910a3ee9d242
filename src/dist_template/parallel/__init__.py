"""Distributes a model over ranks.

place.py          builds a model and lets the strategy shard it: the only interface
starting.py       starting weights, made by ranks in turns; scatter.py sends every rank its shards
own_format.py     saves and loads checkpoints of MeshStrategy and ZeroStrategy
rank_view.py      what every strategy answers on a rank of a training
mesh/             MeshStrategy: FSDP2, HSDP, tensor, expert, sequence and pipeline parallelism
zero/             ZeroStrategy: DeepSpeed's ZeRO
blocks.py         activation checkpointing, torch.compile
half.py           parameters in half precision
spec/             what a strategy answers before a start; configured.py is what it reads"""

from .rank_view import rank_view

__all__ = ["rank_view"]
