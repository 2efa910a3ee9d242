"""From a model to its place on the machine: the one seam between module.py and the strategies, the order said once.

1  build           on rank 0 with weights, elsewhere a skeleton, from the run's seed: the strategy does not matter;
                   in the precision's type before anything is cut
2  checkpointing   inside of compile, so that the compiler sees what is computed again
3  compile         block by block: inside of the sharding, whose hooks it could not compile
4  shard           tensor and expert parallelism inside the blocks, FSDP2 or ZeRO around them
5  fill            every rank receives its part of rank 0's weights
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import weights
from ..errors import reason
from .blocks import BlockConfig, wrap_blocks


def place(build: Callable[[], nn.Module], strategy: Any, blocks: BlockConfig) -> nn.Module:
    """The model that `build` makes, as `strategy` wants it on this rank.

    Raises:
        InputError: the model has no blocks or plan for what is asked.
    """
    seed = torch.initial_seed()
    torch.manual_seed(seed)
    if weights.is_rank_zero():
        with torch.device("cpu"):  # under some strategies Lightning's default is the GPU, whose generator is another
            model = build()
    else:
        model = _skeleton(build)
    model = strategy.precision_plugin.convert_module(model)
    # Dropout differs between ranks that see different batches, and agrees between those that share one.
    torch.manual_seed(seed + getattr(strategy, "distributed_sampler_kwargs", {"rank": 0})["rank"])
    wrap_blocks(model, blocks)
    if hasattr(strategy, "shard"):
        return strategy.shard(model)
    weights.spread(model, strategy.root_device)
    return model


def _skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes, without memory; with memory where it cannot do without, which is told once."""
    try:
        with torch.device("meta"):
            model = build()
        attributes = (value for module in model.modules() for value in vars(module).values())
        if not any(isinstance(value, Tensor) and value.is_meta for value in attributes):
            return model
        why = "a tensor of it is neither a parameter nor a buffer"
    except (NotImplementedError, RuntimeError) as error:  # it looked at a value, which a meta tensor has not
        why = reason(error)
    warnings.warn(f"the model cannot be built on torch's meta device ({why}): each rank builds it whole", stacklevel=2)
    return build()
