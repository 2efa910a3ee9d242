"""A frozen model beside the trained one: the reference of preferences, the teacher of distillation.

It is placed by the run's own strategy, and checkpoints contain its hash alone. Where the trained
network has adapters, its base is the frozen model: they are switched off, and no copy is needed."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...checkpoint.frozen import FrozenHash, exclude_frozen
from ...compat.transformers import without_adapters
from ...parallel.place import place


def add_frozen(module: Any, build: Callable[[], nn.Module]) -> None:
    """Gives `module` the model of `build` as its `reference`, placed by its own strategy."""
    # Lightning warns of modules in eval mode, in which only the reference's passes are
    frozen = FrozenHash()
    module.reference = place(build, module.trainer.strategy, module.blocks, frozen).train()
    module.frozen_reference = frozen.entry(module.frozen_reference["name"])
    exclude_frozen(module, "reference.")


@contextmanager
def as_frozen(module: Any) -> Generator[None]:
    """Inside, a forward pass of `module` is the frozen model's, without dropout."""
    model, counts = module.model, module.balancer.counts_now
    reference = module.reference
    if reference is None:  # the network's base, without its adapters
        reference = model
    module.balancer.counts_now = False
    module.model = reference
    training = reference.training
    reference.eval()
    try:
        with without_adapters(reference):
            yield
    finally:
        reference.train(training)
        module.model, module.balancer.counts_now = model, counts


def reshard(reference: nn.Module | None) -> None:
    """Frees the outermost unit, which FSDP2 keeps for a backward pass."""
    if reference is None:
        return
    for unit in reference.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
