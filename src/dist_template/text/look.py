"""A look at the data before training, by rank 0: what diagnosis needs to know of them, in well under a second.

Whatever the size of the cache, no more than the constants say is read.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .order import NOT_COUNTED

ROWS = 64  # of the train split, spread evenly over it
TRAIN_TOKENS, VALIDATION_TOKENS = 2**22, 2**20  # in which duplicates are looked for: 0.3 s
PARTS = 16  # pieces of a split that these tokens are taken from, spread evenly over it
# Bytes of text that two documents share only if one was copied: 50 tokens of some 4 bytes, the length from which
# "Deduplicating Training Data Makes Language Models Better" (arXiv:2107.06499) takes a repeated string for a copy.
COPY_BYTES = 200
SAMPLED_BITS = 4  # one window in 2**SAMPLED_BITS is compared, chosen by its content: the same in both splits


def look(data: Any) -> dict[str, Any]:
    """What a few rows and a few million tokens show; of an edited data module whose batches are others, nothing.

    Returns:
        counted_share: Share of the labels that count.
        unshifted_share: Share of them that repeat the token that they stand at. Next-token labels hardly ever do.
        distinct_tokens: How many different token ids the rows have.
        looked_at_tokens: In the rows.
        duplicate_share: Share of the validation split's text whose next `COPY_BYTES` bytes stand in the train split
            too, in any place. Splits keep exact duplicates together: this finds documents that differ a little. Where
            a split is longer than what is read of it, less than there is. None: there is no validation split.
        duplicate_looked_at_share: How much of the train split was compared.
    """
    loader: Any = data.train_dataloader()
    whole = max(1, len(loader.dataset) - 1)  # of the last row only a part may count
    indices = np.unique(np.linspace(0, whole - 1, ROWS, dtype=np.int64)).tolist()
    try:
        batch = loader.collate_fn(loader.dataset.__getitems__(indices))
        inputs, labels = batch["input_ids"].numpy(), batch["labels"].numpy()  # (B, T) each
    except (AttributeError, KeyError, TypeError, IndexError):
        return {}
    counted = labels != NOT_COUNTED
    train, validation = data.corpus.tokens("train"), data.corpus.tokens("validation")
    bytes_per_token = data.bytes_per_token("train") or 1.0
    return {
        "counted_share": float(counted.mean()),
        "unshifted_share": float((labels == inputs)[counted].mean()) if counted.any() else None,
        "distinct_tokens": len(np.unique(inputs)),
        "looked_at_tokens": inputs.size,
        "duplicate_share": duplicate_share(train, validation, max(8, round(COPY_BYTES / bytes_per_token))),
        "duplicate_looked_at_share": min(1.0, TRAIN_TOKENS / max(1, len(train))),
    }


def duplicate_share(train: np.ndarray, validation: np.ndarray, length: int) -> float | None:
    """Share of `validation`'s windows of some `length` tokens that `train` has too; both are one line of tokens."""
    ours = _windows(validation, VALIDATION_TOKENS, length)
    return float(np.isin(ours, _windows(train, TRAIN_TOKENS, length)).mean()) if len(ours) else None


def _windows(tokens: np.ndarray, limit: int, length: int) -> np.ndarray:
    """Hashes of a part of all windows of 2**k tokens, the power next to `length`, in at most `limit` tokens."""
    parts = np.array_split(tokens, PARTS) if len(tokens) > limit else [tokens]
    return np.concatenate([_of_part(part[: limit // len(parts)], round(math.log2(length))) for part in parts])


def _of_part(tokens: np.ndarray, doublings: int) -> np.ndarray:
    hashes = tokens.astype(np.uint64) + np.uint64(1)
    factor = 0x9E3779B97F4A7C15  # odd, its bits without a pattern (Knuth's multiplicative hashing)
    for doubling in range(doublings):  # of two windows side by side: h(ab) = h(a) * factor**len(b) + h(b), mod 2**64
        half = 2**doubling
        hashes = hashes[:-half] * np.uint64(pow(factor, half, 2**64)) + hashes[half:]
    return hashes[(hashes * np.uint64(factor)) >> np.uint64(64 - SAMPLED_BITS) == 0]
