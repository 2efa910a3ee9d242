"""Statistics of prepared data: which labels count, and how much train text the held-out splits contain.

Rank 0 measures them at each start, in well under a second: no more is read than the constants below say.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .token_cache import Corpus

PARTS = 16  # slices, spread evenly over a split, in which it is read
ROWS = 64  # of the train split, spread evenly over it
TRAIN_TOKENS, HELD_OUT_TOKENS = 2**22, 2**20  # that are compared: 0.3 s
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, irregular bits (Knuth's multiplicative hashing)
# Bytes of text that two documents share only if one was copied from the other: 50 tokens of about 4 bytes, the length
# of a duplicate in "Deduplicating Training Data Makes Language Models Better" (arXiv:2107.06499).
DUPLICATE_BYTES = 200
# One window in 2**SAMPLED_BITS is compared, chosen by its content: the same in both splits.
SAMPLED_BITS = 4


def data_statistics(data: Any) -> dict[str, float | None]:
    """Returns statistics of some rows; {} if a customised data module yields another batch format.

    counted_share is the share of the labels that count, unshifted_share the share of these that equal their input
    token, as next-token labels rarely do. duplicate_share is the contaminated share of validation.
    """
    from ..batches.rows import NOT_COUNTED  # imports torch

    loader: Any = data.train_dataloader()
    try:
        num_full = max(1, len(loader.dataset) - 1)  # labels of the last row may not count
        indices = np.unique(np.linspace(0, num_full - 1, ROWS, dtype=np.int64)).tolist()
        batch = loader.collate_fn(loader.dataset.__getitems__(indices))
        inputs, labels = batch["input_ids"].numpy(), batch["labels"].numpy()  # (B, T) each
    except (AttributeError, KeyError, TypeError, IndexError):
        return {}
    counted = labels != NOT_COUNTED
    return {
        "counted_share": float(counted.mean()),
        "unshifted_share": float((labels == inputs)[counted].mean()) if counted.any() else None,
        "distinct_tokens": len(np.unique(inputs)),
        "duplicate_share": contaminated_share(data.corpus, "validation"),
    }


def contaminated_share(corpus: Corpus, split: str) -> float | None:
    """Returns the share of a held-out split's passages of 200 bytes that the train split has too.

    These are of documents that differ slightly, since exact duplicates are in one split. The share is too low where a
    split is longer than what is read of it.
    """
    compared = []
    for name in ("train", split):
        tokens = corpus.tokens(name)
        if corpus.is_whole(name):  # prompts repeat: only the labels that count are compared
            tokens = tokens[: 4 * TRAIN_TOKENS]
            tokens = tokens[corpus.counted(name)[: len(tokens)]]
        compared.append(tokens)
    bytes_per_token = corpus.num_bytes("train") / max(1, corpus.num_tokens("train")) or 1.0
    return duplicate_share(*compared, max(8, round(DUPLICATE_BYTES / bytes_per_token)))


def duplicate_share(train: np.ndarray, held_out: np.ndarray, length: int) -> float | None:
    """Returns the share of `held_out`'s windows of about `length` tokens that `train` has too."""
    windows = _windows(held_out, HELD_OUT_TOKENS, length)
    if not len(windows):
        return None
    return float(np.isin(windows, _windows(train, TRAIN_TOKENS, length)).mean())


def _windows(tokens: np.ndarray, limit: int, length: int) -> np.ndarray:
    """Hashes windows of 2**k tokens, about `length`, in at most `limit` tokens; returns a sample of them."""
    size = len(tokens) if len(tokens) <= limit else limit // PARTS
    starts = [0] if size == len(tokens) else np.linspace(0, len(tokens) - size, PARTS, dtype=np.int64).tolist()
    found = []
    for start in starts:
        hashes = tokens[start : start + size].astype(np.uint64) + np.uint64(1)
        # Adjacent windows a and b: h(ab) = h(a) * FACTOR**len(b) + h(b)
        for doubling in range(round(math.log2(length))):
            half = 2**doubling
            hashes = hashes[:-half] * np.uint64(pow(int(FACTOR), half, 2**64)) + hashes[half:]
        found.append(hashes[hashes * FACTOR >> np.uint64(64 - SAMPLED_BITS) == 0])
    return np.concatenate(found)
