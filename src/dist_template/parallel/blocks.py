"""Activation checkpointing and torch.compile for each block of a model, under every strategy.

Both replace a block's `forward`, so that modules and parameters keep their names. The hooks of
FSDP2 and ZeRO-3, which gather a block's parameters, stay outside of them; the hooks of tensor and
expert parallelism stay inside."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..compat.torch import EXPENSIVE, compile_checkpointed_hooks
from ..compat.transformers import names_of_blocks
from ..errors import InputError
from ..ranges import PositiveInt

__all__ = ["find_blocks", "wrap_blocks"]

Function = Callable[..., object]
OF_EXPERTS = ("aten._grouped_mm.default", "aten.bmm.default")


@dataclass
class BlockConfig:
    """Activation checkpointing and compilation of each transformer block.

    Args:
        checkpointing: full saves only a block's input and recomputes the rest in the backward pass,
            for about a third more compute; selective also saves the results of matrix products and
            attention; none saves everything.
        checkpoint_every: Checkpoint every n-th block; 1: all. No effect if checkpointing is none.
        compile: Compile each block with torch.compile. false: off."""

    checkpointing: Literal["none", "full", "selective"] = "none"
    checkpoint_every: PositiveInt = 1
    compile: bool = False


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated layers of `model`, in order, or []. transformers names their classes;
    else they are the items of the outermost nn.ModuleLists."""
    names = names_of_blocks(model)
    if blocks := [module for module in model.modules() if type(module).__name__ in names]:
        return blocks
    inside: str | None = None  # the prefix of the newest outermost list, whose items come next
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not (inside and name.startswith(inside)):
            inside = f"{name}."
            blocks += module
    return blocks


def wrap_blocks(model: nn.Module, config: BlockConfig) -> None:
    """Applies `config` to every block of `model`, in place. Raises InputError if it needs blocks
    and there are none."""
    if config.checkpointing == "none" and not config.compile:
        return
    blocks = find_blocks(model)
    if not blocks:
        raise InputError(
            f"model.blocks is set and {type(model).__name__} has no blocks: keep its layers in an"
            " nn.ModuleList"
        )
    if config.compile and config.checkpointing != "none":
        compile_checkpointed_hooks()
    for number, block in enumerate(blocks):
        if config.checkpointing != "none" and number % config.checkpoint_every == 0:
            block.forward = _checkpointed(block, block.forward, config.checkpointing == "selective")
        if config.compile:
            block.forward = _compiled(block.forward)


def _checkpointed(block: nn.Module, forward: Function, selective: bool) -> Function:
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        # transformers' experts add a bias in place to their product, which cannot be kept then.
        has_bias = any(getattr(module, "has_bias", False) for module in block.modules())
        kept = {each for each in EXPENSIVE if not (has_bias and str(each) in OF_EXPERTS)}

        def policy(
            context: object, operation: object, *_: object, **__: object
        ) -> CheckpointPolicy:
            """Saves results that are expensive to recompute; norms, activations and rotations are
            cheap."""
            return (
                CheckpointPolicy.MUST_SAVE
                if operation in kept
                else CheckpointPolicy.PREFER_RECOMPUTE
            )

        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    @functools.wraps(forward)
    def wrapped(*args: object, **kwargs: object) -> object:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return wrapped


def _compiled(forward: Function) -> Function:
    fast = torch.compile(forward)

    @functools.wraps(forward)
    def wrapped(*args: object, **kwargs: object) -> object:
        # In generation shapes change with each token, and each would be compiled.
        generates = kwargs.get("past_key_values") is not None
        return forward(*args, **kwargs) if generates else fast(*args, **kwargs)

    return wrapped
