"""Quality of prepared data: duplicates, lengths, masked tokens, contamination of validation.

`prepare` measures a new cache once; `quality.json` in the cache has the result, which the run's
report shows. No more is read than the constants below say, so it takes at most two seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from ...records import write_atomically
from ...table import Table

if TYPE_CHECKING:
    from .token_cache import Corpus

FILE = "quality.json"
TOKENS, DOCUMENTS = 2**22, 2**12  # of the train split, in PARTS slices spread evenly over it
PARTS = 16
SHINGLE_DOUBLINGS = 3  # near duplicates share windows of 2**3 tokens
SHINGLES = 256  # windows of a document that are compared: those with the smallest hashes
SIMILAR = 0.8  # Jaccard index of two documents' windows, from which they are near duplicates
BANDS, PERMUTATIONS = 8, 64  # of MinHash's locality-sensitive hashing


def quality_of(corpus: Corpus) -> dict[str, Any]:
    """Returns the figures of a cache, which are measured the first time and stored in it."""
    figures = stored(corpus)
    if figures is None:
        figures = measure(corpus)
        with contextlib.suppress(OSError):  # the cache may be read-only: measured again next time
            write_atomically(corpus.folder / FILE, json.dumps(figures))
    return figures


def stored(corpus: Corpus) -> dict[str, Any] | None:
    """Returns the figures that `prepare` stored; None: it did not."""
    path = corpus.folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def measure(corpus: Corpus) -> dict[str, Any]:
    """Measures the train split, and what of it is in the validation split.

    Returns:
        documents, examined_share: What was examined. Duplicates are found among these documents
            alone, so where they are a part of a corpus the shares are lower than the true ones.
        near_duplicate_share: None where the package datasketch is not installed.
        masked_share: Share of the tokens that are no labels. None: all are labels.
        contaminated_share: Share of the validation split's text of 200 bytes that train has too.
    """
    from .data_stats import DUPLICATE_BYTES, duplicate_share  # imports torch

    whole, documents = corpus.is_whole("train"), _documents(corpus)
    lengths = np.array([len(document) for document in documents] or [0])
    unique = {hashlib.blake2b(each.tobytes()).digest(): each for each in documents}
    num, total = len(documents), corpus.num_tokens("train")
    bytes_per_token = corpus.num_bytes("train") / max(1, total) or 1.0
    window = max(8, round(DUPLICATE_BYTES / bytes_per_token))
    near = similar([*unique.values()]) if find_spec("datasketch") else None
    return {
        "documents": num,
        "examined_share": int(lengths.sum()) / max(1, total),
        "median_tokens": int(np.median(lengths)),
        "p95_tokens": int(np.percentile(lengths, 95)),
        "longest_tokens": int(lengths.max()),
        "duplicate_share": 1 - len(unique) / max(1, num),
        "near_duplicate_share": None if near is None else near / max(1, num),
        "masked_share": 1 - float(corpus.counted("train")[:TOKENS].mean()) if whole else None,
        "contaminated_share": duplicate_share(
            corpus.tokens("train"), corpus.tokens("validation"), window
        ),
    }


def similar(documents: list[np.ndarray]) -> int:
    """Returns how many documents are similar to an earlier one, by MinHash."""
    from datasketch import MinHash, MinHashLSH

    from .data_stats import window_hashes

    index = MinHashLSH(num_perm=PERMUTATIONS, params=(BANDS, PERMUTATIONS // BANDS))
    empty = MinHash(num_perm=PERMUTATIONS, hashfunc=int)
    earlier: dict[Any, Any] = {}
    found = 0
    for document in documents:
        hashes = np.unique(window_hashes(document, SHINGLE_DOUBLINGS))[:SHINGLES]
        if not len(hashes):
            continue  # shorter than a window
        sketch = empty.copy()
        sketch.update_batch((hashes % 2**32).tolist())
        found += any(sketch.jaccard(earlier[one]) >= SIMILAR for one in index.query(sketch))
        index.insert(len(earlier), sketch)
        earlier[len(earlier)] = sketch
    return found


def as_table(figures: dict[str, Any], title: str = "") -> Table:
    """Returns the figures that are known; those whose names end in `share` as percentages."""
    rows = []
    for name, value in figures.items():
        if value is not None:
            text = f"{value:.1%}" if name.endswith("share") else f"{value:,}"
            rows.append([name.replace("_", " "), text])
    missing = figures.get("near_duplicate_share", 0) is None
    note = "Near duplicates need the package datasketch: pip install 'dist-template[quality]'"
    return Table(title, ["", ""], rows, note if missing else "")


def _documents(corpus: Corpus) -> list[np.ndarray]:
    """Returns complete documents of a sample of the train split."""
    tokens, end = corpus.tokens("train"), corpus.manifest["eos_token_id"]
    whole = corpus.starts("train") if corpus.is_whole("train") else None
    num_parts = PARTS if len(tokens) > TOKENS else 1
    documents: list[np.ndarray] = []
    for first in range(0, len(tokens), -(-len(tokens) // num_parts)):
        part = tokens[first : first + TOKENS // num_parts]
        if whole is None:
            starts = np.flatnonzero(part == end) + 1
            starts = starts if first else np.append(0, starts)
        else:
            low, high = np.searchsorted(whole, [first, first + len(part) + 1])
            starts = whole[low:high] - first
        documents += np.split(part, starts)[1:-1][: DOCUMENTS // num_parts]
    return documents
