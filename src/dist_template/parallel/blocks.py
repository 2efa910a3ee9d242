"""What is done to each block of a model, under every strategy: activation checkpointing, then torch.compile.

Both replace a block's `forward` and leave the tree of modules, and so every parameter's name, as it is. The hooks that
shard a block (FSDP2, ZeRO-3) stay outside of them; those inside (tensor and expert parallelism) stay inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..compat.torch import EXPENSIVE, compile_checkpointed_hooks
from ..compat.transformers import names_of_blocks
from ..errors import InputError


@dataclass
class BlockConfig:
    """What is done to each transformer block.

    Args:
        checkpointing: full keeps a block's input alone and computes the rest again in backward, about a third more
            compute; selective also keeps the results of matrix products and attention; none keeps everything.
        checkpoint_every: Checkpoint every n-th block, 1 for all of them. Has no effect when checkpointing is none.
        compile: Compile each block with torch.compile. false: off.
    """

    checkpointing: Literal["none", "full", "selective"] = "none"
    checkpoint_every: int = 1
    compile: bool = False


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of `model`, in order; empty where it has none.

    They are what transformers says must not be split, else the items of the outermost nn.ModuleLists.
    """
    names = names_of_blocks(model)
    if blocks := [module for module in model.modules() if type(module).__name__ in names]:
        return blocks
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return [block for blocks in outermost for block in blocks]


def wrap_blocks(model: nn.Module, config: BlockConfig) -> None:
    """Apply `config` to every block of `model`, in place.

    Raises:
        InputError: it asks for something and the model has no blocks.
    """
    if config.checkpointing == "none" and not config.compile:
        return
    blocks = find_blocks(model)
    if not blocks:
        raise InputError(
            f"model.blocks is set and {type(model).__name__} has no blocks: keep its layers in an nn.ModuleList"
        )
    if config.compile and config.checkpointing != "none":
        compile_checkpointed_hooks()
    for number, block in enumerate(blocks):
        if config.checkpointing != "none" and number % config.checkpoint_every == 0:
            block.forward = _checkpointed(block, block.forward, config.checkpointing == "selective")
        if config.compile:
            block.forward = _compiled(block.forward)


def _checkpointed(block: nn.Module, forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_products)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return wrapped


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is dear to compute; norms, activations and rotations are cheap to compute again."""
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    fast = torch.compile(forward)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        generates = kwargs.get("past_key_values") is not None  # tensors grow with each token: compiled anew each time
        return forward(*args, **kwargs) if generates else fast(*args, **kwargs)

    return wrapped
