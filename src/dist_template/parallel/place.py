"""Builds and distributes a model: the only interface between a module and the strategies.

1  start           builds on the meta device, and records how the weights are made; parameters are
cast first 2  checkpointing   inside of compile, so that the compiler sees the recomputation 3
compile         block by block, inside of the sharding, whose hooks cannot be compiled 4  shard
tensor and expert parallelism inside the blocks, FSDP2 or ZeRO around them 5  fill            owners
make the weights in turns, and every rank receives its shards"""

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from .. import processes
from ..checkpoint.frozen import FrozenHash
from . import scatter
from .blocks import BlockConfig, wrap_blocks
from .rank_view import rank_view
from .starting import Build, start_of


def place(
    build: Build, strategy: Strategy, blocks: BlockConfig, frozen: FrozenHash | None = None
) -> nn.Module:
    """Returns this rank's part of the model that `build` makes. Raises InputError if the model has
    no blocks or no plan for what `blocks` or the strategy needs. Collective; `frozen` gets the
    model's frozen parameters."""
    # a model before this one may have left each rank another
    seed = processes.broadcast(torch.initial_seed())
    start = start_of(build, strategy.precision_plugin.convert_module, seed, frozen)
    # Dropout differs between ranks that have different tokens, and only between those.
    answers = rank_view(strategy)
    torch.manual_seed(seed + answers.random_rank)
    wrap_blocks(start.model, blocks)
    return answers.shard(start)


def build_unsharded(build: Build, frozen: FrozenHash | None = None) -> nn.Module:
    """Returns the model that `build` makes, with the weights that `place` gives it, in this
    process' host memory."""
    start = start_of(build, lambda model: model, torch.initial_seed(), frozen)
    scatter.allocate(start.model, torch.device("cpu"))
    start.fill(start.model)
    return start.model
