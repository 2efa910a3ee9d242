"""Statistics of the data before training, on rank 0: the facts that diagnosis needs, in well under
a second.

No more is read than the constants below say, whatever the size of the cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..batches.rows import NOT_COUNTED

ROWS = 64  # of the train split, spread evenly over it
TRAIN_TOKENS, VALIDATION_TOKENS = 2**22, 2**20  # compared for duplicates: 0.3 s
FACTOR = 0x9E3779B97F4A7C15  # odd, with irregular bits (Knuth's multiplicative hashing)
PARTS = 16  # slices of a split that these tokens are taken from, spread evenly over it
# Bytes of text that two documents share only if one was copied from the other: 50 tokens of about 4
# bytes, the length of a duplicate in "Deduplicating Training Data Makes Language Models Better"
# (arXiv:2107.06499).
DUPLICATE_BYTES = 200
SAMPLED_BITS = (
    4  # one window in 2**SAMPLED_BITS is compared, chosen by its content: the same in both splits
)


def data_statistics(data: Any) -> dict[str, Any]:
    """Returns statistics of some rows; {} if a customised data module yields another batch format.

    Returns:
        counted_share: Share of the labels that count.
        unshifted_share: Share of them that are equal to their input token, which next-token labels
            rarely are.
        distinct_tokens: Number of different token ids in the rows.
        examined_tokens: Number of tokens in the rows.
        duplicate_share: Share of the validation split's text whose next `DUPLICATE_BYTES` bytes are
            in the train split too. Exact duplicates are always in one split, so this finds
            documents that differ slightly. Lower than the true share where a split is longer than
            what is read of it. None: there is no validation split.
        duplicate_examined_share: Share of the train split that was compared.
    """
    loader: Any = data.train_dataloader()
    try:
        num_full = max(1, len(loader.dataset) - 1)  # labels of the last row may not count
        indices = np.unique(np.linspace(0, num_full - 1, ROWS, dtype=np.int64)).tolist()
        batch = loader.collate_fn(loader.dataset.__getitems__(indices))
        inputs, labels = batch["input_ids"].numpy(), batch["labels"].numpy()  # (B, T) each
    except (AttributeError, KeyError, TypeError, IndexError):
        return {}
    counted = labels != NOT_COUNTED
    train, validation = _compared(data.corpus, "train"), _compared(data.corpus, "validation")
    bytes_per_token = data.corpus.num_bytes("train") / len(data.corpus.tokens("train"))
    return {
        "counted_share": float(counted.mean()),
        "unshifted_share": float((labels == inputs)[counted].mean()) if counted.any() else None,
        "distinct_tokens": len(np.unique(inputs)),
        "examined_tokens": inputs.size,
        "duplicate_share": duplicate_share(
            train, validation, max(8, round(DUPLICATE_BYTES / bytes_per_token))
        ),
        "duplicate_examined_share": min(1.0, TRAIN_TOKENS / max(1, len(train))),
    }


def _compared(corpus: Any, split: str) -> np.ndarray:
    """Returns a split's tokens; of conversations the labels that count, since prompts repeat."""
    tokens = corpus.tokens(split)
    if corpus.is_whole(split):
        tokens = tokens[: 4 * TRAIN_TOKENS]
        tokens = tokens[corpus.counted(split)[: len(tokens)]]
    return tokens


def duplicate_share(train: np.ndarray, validation: np.ndarray, length: int) -> float | None:
    """Returns the share of `validation`'s windows of about `length` tokens that `train` has too."""
    windows = _windows(validation, VALIDATION_TOKENS, length)
    return (
        float(np.isin(windows, _windows(train, TRAIN_TOKENS, length)).mean())
        if len(windows)
        else None
    )


def _windows(tokens: np.ndarray, limit: int, length: int) -> np.ndarray:
    """Hashes a sample of all windows of 2**k tokens, about `length`, in at most `limit` tokens."""
    parts = np.array_split(tokens, PARTS) if len(tokens) > limit else [tokens]
    doublings = round(math.log2(length))
    return np.concatenate([_hashes(part[: limit // len(parts)], doublings) for part in parts])


def _hashes(tokens: np.ndarray, doublings: int) -> np.ndarray:
    """Returns the hashes of a sample of the windows, chosen by their content."""
    hashes = window_hashes(tokens, doublings)
    return hashes[(hashes * np.uint64(FACTOR)) >> np.uint64(64 - SAMPLED_BITS) == 0]


def window_hashes(tokens: np.ndarray, doublings: int) -> np.ndarray:
    """Returns the hash of each window of 2**doublings tokens."""
    hashes = tokens.astype(np.uint64) + np.uint64(1)
    # Adjacent windows a and b: h(ab) = h(a) * FACTOR**len(b) + h(b)
    for doubling in range(doublings):
        half = 2**doubling
        hashes = hashes[:-half] * np.uint64(pow(FACTOR, half, 2**64)) + hashes[half:]
    return hashes
