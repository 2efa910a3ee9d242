"""Logits by which `export` compares models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def probe(model: Any) -> Tensor:
    """Returns (B, T) random tokens, the same in every call."""
    shape = (2, min(64, getattr(model.config, "max_position_embeddings", 64)))
    vocab_size = model.get_input_embeddings().num_embeddings
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    """Returns (B, T, V) logits in float32."""
    return model(input_ids=tokens, use_cache=False).logits.float()


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
