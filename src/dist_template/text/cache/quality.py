"""Quality of prepared data: duplicates, lengths, masked tokens, contamination of validation.

`prepare` measures a new cache once; `quality.json` in the cache has the result, which the run's
report shows. Rank 0 measures what diagnosis needs at each start. No more is read than the constants
below say: `prepare` takes at most two seconds for it, a start well under one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ...records import write_atomically
from ...table import Table

if TYPE_CHECKING:
    from .token_cache import Corpus

FILE = "quality.json"
PARTS = 16  # slices, spread evenly over a split, in which it is read
TOKENS, DOCUMENTS = 2**22, 2**12  # of the train split, in which duplicates are counted
SHINGLE_DOUBLINGS = 3  # near duplicates share windows of 2**3 tokens
SHINGLES = 256  # windows of a document that are compared: those with the smallest hashes
SIMILAR = 0.8  # Jaccard index of two documents' windows, from which they are near duplicates
PERMUTATIONS = 64  # of MinHash
ROWS = 64  # of the train split, spread evenly over it
# compared to find text of train in validation: 0.3 s
TRAIN_TOKENS, VALIDATION_TOKENS = 2**22, 2**20
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, irregular bits (Knuth's multiplicative hashing)
# Bytes of text that two documents share only if one was copied from the other: 50 tokens of about 4 bytes, the length
# of a duplicate in "Deduplicating Training Data Makes Language Models Better" (arXiv:2107.06499).
DUPLICATE_BYTES = 200
# One window in 2**SAMPLED_BITS is compared, chosen by its content: the same in both splits.
SAMPLED_BITS = 4


def quality_of(corpus: Corpus) -> dict[str, float | None]:
    """Returns the figures of a cache, which are measured the first time and stored in it."""
    figures = stored(corpus)
    if figures is None:
        figures = measure(corpus)
        with contextlib.suppress(OSError):  # the cache may be read-only: measured again next time
            write_atomically(corpus.folder / FILE, json.dumps(figures))
    return figures


def stored(corpus: Corpus) -> dict[str, float | None] | None:
    """Returns the figures that `prepare` stored; None: it did not."""
    path = corpus.folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def as_table(figures: Mapping[str, float | None], title: str = "") -> Table:
    """Returns the known figures; those whose names end in `share` as percentages."""
    rows = []
    for name, value in figures.items():
        if value is not None:
            text = f"{value:.1%}" if name.endswith("share") else f"{value:,}"
            rows.append([name.replace("_", " "), text])
    return Table(title, ["", ""], rows)


def measure(corpus: Corpus) -> dict[str, float | None]:
    """Measures the train split, and which share of the validation split it contains.

    Duplicates are found among the examined documents alone, so where these are a part of a corpus
    the shares are lower than the true ones. masked_share is None where all tokens are labels.
    """
    documents = _documents(corpus)
    lengths = np.array([len(document) for document in documents] or [0])
    unique = {hashlib.blake2b(each.tobytes()).digest(): each for each in documents}
    masked_share = None
    if corpus.is_whole("train"):
        masked_share = 1 - float(corpus.counted("train")[:TOKENS].mean())
    return {
        "documents": len(documents),
        "examined_share": int(lengths.sum()) / max(1, corpus.num_tokens("train")),
        "median_tokens": int(np.median(lengths)),
        "p95_tokens": int(np.percentile(lengths, 95)),
        "longest_tokens": int(lengths.max()),
        "duplicate_share": 1 - len(unique) / max(1, len(documents)),
        "near_duplicate_share": similar([*unique.values()]) / max(1, len(documents)),
        "masked_share": masked_share,
        "contaminated_share": contaminated_share(corpus, "validation"),
    }


def _documents(corpus: Corpus) -> list[np.ndarray]:
    """Returns complete documents of a sample of the train split."""
    tokens, documents = corpus.tokens("train"), []
    starts = corpus.starts("train") if corpus.is_whole("train") else None
    slices = _slices(len(tokens), TOKENS)
    for first, last in slices:
        if starts is not None:
            bounds = starts[(first <= starts) & (starts <= last)]
        else:
            ends = np.flatnonzero(tokens[first:last] == corpus.manifest["eos_token_id"])
            bounds = first + 1 + ends if first else np.append(0, 1 + ends)
        found = [tokens[start:end] for start, end in pairwise(bounds)]
        documents += found[: DOCUMENTS // len(slices)]
    return documents


def _slices(num_tokens: int, limit: int) -> list[tuple[int, int]]:
    """Returns starts and ends: all tokens, or `PARTS` slices with `limit` tokens in total."""
    if num_tokens <= limit:
        return [(0, num_tokens)]
    size = limit // PARTS
    starts = np.linspace(0, num_tokens - size, PARTS, dtype=np.int64).tolist()
    return [(start, start + size) for start in starts]


def similar(documents: list[np.ndarray]) -> int:
    """Returns how many documents are near duplicates of an earlier one, by MinHash."""
    seeds = np.random.default_rng(0).integers(2**62, size=(PERMUTATIONS, 1), dtype=np.uint64)
    sketches, num, found = np.zeros((len(documents), PERMUTATIONS), dtype=np.uint64), 0, 0
    for document in documents:
        hashes = np.unique(window_hashes(document, SHINGLE_DOUBLINGS))[:SHINGLES]
        if len(hashes):  # else it is shorter than a window
            sketch = (hashes * (2 * seeds + 1)).min(axis=1)
            alike = (sketches[:num] == sketch).mean(axis=1)  # estimates of the Jaccard index
            found += bool((alike >= SIMILAR).any())
            sketches[num], num = sketch, num + 1
    return found


def data_statistics(data: Any) -> dict[str, float | None]:
    """Returns statistics of some rows; {} if a customised data module yields another batch format.

    counted_share is the share of the labels that count, unshifted_share the share of these that equal their input
    token, as next-token labels rarely do. duplicate_share is the share of validation whose next `DUPLICATE_BYTES` bytes
    are in train too: documents that differ slightly, since exact duplicates are in one split. It is too low where a
    split is longer than what is read of it; duplicate_examined_share is the share of train that is read.
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
    compared = {}
    for split in ("train", "validation"):
        tokens = data.corpus.tokens(split)
        if data.corpus.is_whole(split):  # prompts repeat: only the labels that count are compared
            tokens = tokens[: 4 * TRAIN_TOKENS]
            tokens = tokens[data.corpus.counted(split)[: len(tokens)]]
        compared[split] = tokens
    return {
        "counted_share": float(counted.mean()),
        "unshifted_share": float((labels == inputs)[counted].mean()) if counted.any() else None,
        "distinct_tokens": len(np.unique(inputs)),
        "examined_tokens": inputs.size,
        "duplicate_share": duplicate_share(*compared.values(), _window(data.corpus)),
        "duplicate_examined_share": min(1.0, TRAIN_TOKENS / max(1, len(compared["train"]))),
    }


def contaminated_share(corpus: Corpus, split: str) -> float | None:
    """Returns the share of a held-out split's text of 200 bytes that the train split has too."""
    return duplicate_share(corpus.tokens("train"), corpus.tokens(split), _window(corpus))


def _window(corpus: Corpus) -> int:
    """Returns the number of tokens that stand for `DUPLICATE_BYTES` of text."""
    bytes_per_token = corpus.num_bytes("train") / max(1, corpus.num_tokens("train")) or 1.0
    return max(8, round(DUPLICATE_BYTES / bytes_per_token))


def duplicate_share(train: np.ndarray, validation: np.ndarray, length: int) -> float | None:
    """Returns the share of `validation`'s windows of about `length` tokens that `train` has too."""
    windows = _windows(validation, VALIDATION_TOKENS, length)
    if not len(windows):
        return None
    return float(np.isin(windows, _windows(train, TRAIN_TOKENS, length)).mean())


def _windows(tokens: np.ndarray, limit: int, length: int) -> np.ndarray:
    """Hashes windows of 2**k tokens, about `length`, in at most `limit` tokens: a sample that is
    chosen by the windows' content."""
    doublings, found = round(math.log2(length)), []
    for start, end in _slices(len(tokens), limit):
        hashes = window_hashes(tokens[start:end], doublings)
        found.append(hashes[hashes * FACTOR >> np.uint64(64 - SAMPLED_BITS) == 0])
    return np.concatenate(found)


def window_hashes(tokens: np.ndarray, doublings: int) -> np.ndarray:
    """Returns the hash of each window of 2**doublings tokens."""
    hashes = tokens.astype(np.uint64) + np.uint64(1)
    # Adjacent windows a and b: h(ab) = h(a) * FACTOR**len(b) + h(b)
    for doubling in range(doublings):
        half = 2**doubling
        hashes = hashes[:-half] * np.uint64(pow(int(FACTOR), half, 2**64)) + hashes[half:]
    return hashes
