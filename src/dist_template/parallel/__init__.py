"""Distributes a model over ranks.

protocol.py, facts.py         what a strategy answers, and from which data
plain.py                      Lightning's strategies; the memory formulas of all
mesh_sharding.py, axes.py     MeshStrategy's answers: its sizes, and one class for each axis
zero_sharding.py              ZeroStrategy's answers
candidates.py                 the strategies that a machine allows, for `plan`
run_strategy.py               answers on a rank of a training

place.py                      builds a model and lets the strategy shard it: the only interface
mesh.py                       MeshStrategy: FSDP2, HSDP, tensor and expert parallelism
shard.py                      shards a model over its mesh
tensor_trial.py               finds what a tensor-parallel plan forgets
sequence.py                   sequence parallelism, in MeshStrategy
pipeline/                     its pipeline: division of a model, schedules
zero.py                       ZeroStrategy; deepspeed_config.py completes its DeepSpeed JSON
ddp.py                        defaults for Lightning's DDPStrategy
blocks.py, half.py            activation checkpointing, torch.compile; parameters in half precision
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import axes  # noqa: F401  (fills AXES)
from .mesh_sharding import Mesh
from .plain import Plain
from .run_strategy import run_strategy
from .zero_sharding import Zero

__all__ = ["run_strategy", "sharding_of"]
SHARDINGS: dict[str, type[Mesh | Zero]] = {"MeshStrategy": Mesh, "ZeroStrategy": Zero}


def sharding_of(strategy: Any) -> Plain:
    """Returns the configuration of `trainer.strategy`: a name, a class path with arguments, or a
    strategy that has been constructed."""
    if isinstance(strategy, Plain):
        return strategy
    if isinstance(strategy, str):
        return Plain(name=strategy)
    if isinstance(strategy, Mapping):
        name = str(strategy["class_path"]).rpartition(".")[2]
        arguments = {**(strategy.get("init_args") or {}), **(strategy.get("dict_kwargs") or {})}
        return SHARDINGS[name].of(arguments) if name in SHARDINGS else Plain(arguments, name)
    bases = tuple(kind.__name__ for kind in type(strategy).__mro__)
    return getattr(strategy, "sharding", None) or Plain(name=bases[0], bases=bases)
