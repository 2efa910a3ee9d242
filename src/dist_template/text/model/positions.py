"""Gives transformers' models the positions of packed documents where their code counts the row's.

Two groups of models (5.23) ignore `position_ids` in some place, so that a document's logits would
depend on where in the row it is:

    BART and its relatives   the decoder's `forward` takes no position_ids, and its embedding of
                             positions counts the tokens of the row
    Llama-4                  layers without rotary embedding scale their queries by a token's
                             position in the row (attn_temperature_tuning)

Shapes: B sequences, T tokens of a sequence, D width, H heads, W width of a head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat import transformers as compat

POSITIONS = "document_positions"  # keyword argument from a block to its attention kernel
TUNING = "attn_temperature_tuning"
Args = tuple[object, ...]
Options = dict[str, Any]
# The embeddings of each model that has run, after its adapters were added and it was sharded.
_PREPARED: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()


@contextmanager
def positions_of_documents(model: nn.Module, positions: Tensor) -> Generator[None]:
    """Inside, modules of `model` that count the tokens of a row read `positions` (B, T) instead."""
    embeddings = _PREPARED.get(model)
    if embeddings is None:
        embeddings = _PREPARED[model] = _embeddings_of_rows(model)
        _scale_by_documents(model)
    hooks = [each.register_forward_hook(partial(_look_up, positions)) for each in embeddings]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _embeddings_of_rows(model: nn.Module) -> list[nn.Module]:
    """Returns the embeddings of positions in decoders whose `forward` takes no position_ids."""
    found: list[nn.Module] = []
    for module in model.modules():
        embedding = dict(module.named_children()).get("embed_positions")
        if embedding is not None and not _takes_positions(type(module)):
            found.append(embedding)
    return found


@cache
def _takes_positions(kind: type[nn.Module]) -> bool:
    return "position_ids" in inspect.signature(kind.forward).parameters


def _look_up(positions: Tensor, module: nn.Module, args: object, output: Tensor) -> Tensor:
    """Forward hook: `output` has the embeddings of positions 0 to T - 1, (T, D) or, equal for all
    rows, (B, T, D). Returns those of `positions` (B, T): (B, T, D)."""
    row = output[0] if output.dim() > 2 else output
    return F.embedding(positions, row)


def _scale_by_documents(model: nn.Module) -> None:
    """Lets attention that scales its queries by a token's position in the row scale them by the
    position in the document. A block passes the positions on as an argument, so that one that is
    recomputed in the backward pass reads those of its own micro-batch."""
    for block in model.modules():
        for module in block.children():
            if getattr(module, TUNING, False) and not module.use_rope:
                block.register_forward_pre_hook(_pass_positions, with_kwargs=True)
                compat.wrap_attention(module, _rescaled)


def _pass_positions(block: nn.Module, args: Args, kwargs: Options) -> tuple[Args, Options] | None:
    """Forward pre-hook of a block; generation with a cache has one document, and needs none."""
    if kwargs.get("position_ids") is None or kwargs.get("past_key_values") is not None:
        return None
    return args, kwargs | {POSITIONS: kwargs["position_ids"]}


def _rescaled(
    attend: Callable[..., Any], module: Any, queries: Tensor, *others: object, **options: Any
) -> Any:
    """Calls the kernel `attend` with queries (B, H, T, W) of the scale of their documents."""
    positions = options.pop(POSITIONS, None)
    if positions is not None and getattr(module, TUNING, False) and not module.use_rope:
        of_row = torch.arange(queries.shape[2], device=queries.device)  # as the module has counted
        ratio = _scale(module, positions) / _scale(module, of_row)
        queries = (queries * ratio[:, None, :, None]).to(queries.dtype)
    return attend(module, queries, *others, **options)


def _scale(module: Any, positions: Tensor) -> Tensor:
    """Returns what Llama4TextAttention multiplies queries by (arXiv:2501.19399)."""
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    return torch.log1p(steps) * module.attn_scale + 1.0
