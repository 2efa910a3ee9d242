"""Builds and distributes a model: the only interface between a module and the strategies.

1  build           on rank 0 with weights, from the run's seed, so that they do not depend on the
                   strategy; on the other ranks on the meta device. Parameters are cast first
2  checkpointing   inside of compile, so that the compiler sees the recomputation
3  compile         block by block, inside of the sharding, whose hooks cannot be compiled
4  shard           tensor and expert parallelism inside the blocks, FSDP2 or ZeRO around them
5  fill            every rank receives its shard of rank 0's weights
"""

import warnings
from collections.abc import Callable

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from .. import weights
from ..errors import reason
from .blocks import BlockConfig, wrap_blocks
from .run_strategy import run_strategy


def place(build: Callable[[], nn.Module], strategy: Strategy, blocks: BlockConfig) -> nn.Module:
    """Returns this rank's part of the model that `build` makes. Raises InputError if the model has no blocks or no
    plan for what `blocks` or the strategy needs."""
    seed = torch.initial_seed()
    torch.manual_seed(seed)
    if weights.is_rank_zero():
        with torch.device("cpu"):  # Lightning's default may be a GPU, which has another generator
            model = build()
    else:
        model = _skeleton(build)
    model = strategy.precision_plugin.convert_module(model)
    # Dropout differs between ranks that have different tokens, and only between those.
    answers = run_strategy(strategy)
    torch.manual_seed(seed + answers.random_rank)
    wrap_blocks(model, blocks)
    return answers.shard(model)


def _skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds on the meta device; in full, with a warning, if the constructor reads values."""
    try:
        with torch.device("meta"):
            model = build()
        attributes = (value for module in model.modules() for value in vars(module).values())
        if not any(isinstance(value, Tensor) and value.is_meta for value in attributes):
            return model
        why = "a tensor of it is neither a parameter nor a buffer"
    except (NotImplementedError, RuntimeError) as error:  # it read a value of a meta tensor
        why = reason(error)
    cannot = f"the model cannot be built on torch's meta device ({why})"
    warnings.warn(f"{cannot}: each rank builds it in full", stacklevel=2)
    return build()
