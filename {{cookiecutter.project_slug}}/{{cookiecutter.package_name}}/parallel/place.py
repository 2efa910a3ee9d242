"""From a model to its place on the machine: the one seam between module.py and the strategies, the order said once.

    1  build           on rank 0 with weights, elsewhere a skeleton, from the run's seed: the strategy does not matter
    2  checkpointing   inside of compile, so that the compiler sees what is computed again
    3  compile         block by block: inside of the sharding, whose hooks it could not compile
    4  shard           tensor and expert parallelism inside the blocks, FSDP2 or ZeRO around them
    5  fill            every rank receives its part of rank 0's weights
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import weights
from .blocks import BlockConfig, wrap_blocks


def place(build: Callable[[], nn.Module], strategy: Any, blocks: BlockConfig) -> nn.Module:
    """The model that `build` makes, as `strategy` wants it on this rank.

    Raises:
        InputError: the model has no blocks or plan for what is asked.
    """
    seed = torch.initial_seed()
    with torch.random.fork_rng(), weights.skeleton_unless_rank_zero():
        torch.manual_seed(seed)
        model = build()
    wrap_blocks(model, blocks)
    if hasattr(strategy, "shard"):
        return strategy.shard(model)
    weights.spread(model, strategy.root_device)
    return model
