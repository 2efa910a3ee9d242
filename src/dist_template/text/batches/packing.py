"""Packs documents that are not cut, such as conversations, into rows of tokens.

A row of T positions holds the inputs of several documents, each with the next token as its label:
a document of n tokens needs n - 1 positions. The documents of a row do not attend to each other.
Only a document that is longer than a row is cut, to its beginning.

Shapes: B sequences, T tokens of a sequence; ids are int64.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from ..cache.token_cache import Corpus
from ..sources.chat_template import last_turn
from .rows import NOT_COUNTED, PAIRS, SCORES, Rows


class Packing(NamedTuple):
    """Which documents are in which row."""

    documents: np.ndarray  # numbers of documents, row by row
    rows: np.ndarray  # (rows + 1,) starts of the rows in `documents`, and its length
    share: float  # of the positions of all rows that documents fill
    num_cut: int  # documents that are longer than a row and cut
    num_dropped: int  # documents without a counted label in what a row holds of them
    sizes: dict[str, int]  # number of rows of each source of a mixture, in order

    def describe(self, split: str) -> str:
        line = f"  {split:<10} {len(self.rows) - 1:>9,} rows, {self.share:.1%} full"
        if self.num_cut or self.num_dropped:
            line += f"; longer than a row: {self.num_cut:,} documents are cut to their beginning"
            line += f", {self.num_dropped:,} without an answer in it are dropped"
        return line


def best_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Packs items into bins by best fit decreasing, which is deterministic.

    The longest item comes first, into the bin in which it leaves the least space. The set of free
    spaces that some bin has is the bits of one integer, so a million items take seconds.

    Returns the items of each bin in ascending order; the bins in the order of their first item.
    `sizes` (items,) are from 1 to `capacity`, that of a bin.
    """
    bins: list[list[int]] = []
    bins_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by their free space
    spaces = 0  # bit s is set: some bin has s free
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1  # the lowest bit
            number = bins_with[space].pop()
            if not bins_with[space]:
                spaces ^= 1 << space
        else:
            space, number = capacity, len(bins)
            bins.append([])
        bins[number].append(item)
        left = space - size
        if left:
            if not bins_with[left]:
                spaces |= 1 << left
            bins_with[left].append(number)
    return sorted(sorted(items) for items in bins)


def packing_of(corpus: Corpus, split: str, seq_len: int) -> Packing:
    """Returns the rows of a split whose documents are whole; `corpus` keeps them."""
    if known := corpus.packings.get((split, seq_len)):
        return known
    starts, counted, pairs = corpus.starts(split), corpus.counted(split), corpus.is_pairs
    needed = np.diff(starts) - 1  # (documents,) positions
    is_cut = needed > seq_len
    dropped = [
        document
        for document in np.flatnonzero(is_cut)
        if pairs or not counted[starts[document] + 1 : starts[document] + seq_len + 1].any()
    ]
    kept = np.setdiff1d(np.flatnonzero(needed > 0), dropped)
    sizes = np.minimum(needed, seq_len)[kept]
    rows, of_parts, end = [], {}, 0
    for name, part in corpus.parts(split).items():  # a row has documents of one source
        low, high = np.searchsorted(kept, [end, end + part["documents"]])
        own = best_fit(sizes[low:high], seq_len)
        rows += [[int(low) + item for item in row] for row in own]
        of_parts[name], end = len(own), end + part["documents"]
    items = [item for row in rows for item in row]
    corpus.packings[split, seq_len] = packing = Packing(
        documents=kept[np.array(items, dtype=np.int64)],
        rows=np.cumsum([0, *map(len, rows)]),
        share=float(sizes.sum() / max(1, len(rows) * seq_len)),
        num_cut=int(is_cut.sum()) - len(dropped),
        num_dropped=len(dropped),
        sizes=of_parts,
    )
    return packing


class WholeRows(Rows):
    """Rows of T positions with whole documents; the rest of a row is padding."""

    def __init__(
        self, corpus: Corpus, split: str, seq_len: int, cross_document_attention: bool = False
    ) -> None:
        end = corpus.manifest["eos_token_id"]
        super().__init__(corpus.tokens(split), seq_len, end, cross_document_attention)
        self.packing = packing_of(corpus, split, seq_len)
        self.sizes = self.packing.sizes
        self.counted = np.asarray(corpus.counted(split))
        self.starts = corpus.starts(split)

    def read(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs = np.full((len(rows), self.seq_len), self.eos_token_id, dtype=np.int64)  # (B, T)
        labels = np.full_like(inputs, NOT_COUNTED)
        bounds = [0]
        for index, row in enumerate(rows):
            end = index * self.seq_len
            for start, size in self.documents_of(max(row, 0)):  # a padding row reads any row
                tokens = self.tokens[start : start + size + 1].astype(np.int64)
                inputs.flat[end : end + size] = tokens[:-1]
                if row >= 0:
                    counted = self.counted[start + 1 : start + size + 1]
                    labels.flat[end : end + size] = np.where(counted, tokens[1:], NOT_COUNTED)
                end += size
                bounds.append(end)
            if bounds[-1] < (index + 1) * self.seq_len:  # padding is a document too
                bounds.append((index + 1) * self.seq_len)
        return inputs, labels, np.array(bounds, dtype=np.int32)

    def lengths(self, row: int) -> np.ndarray:
        sizes = [size for _, size in self.documents_of(row)]
        return np.array([*sizes, self.seq_len - sum(sizes)])

    def numbers_of(self, row: int) -> np.ndarray:
        """Returns the numbers of a row's documents in their split."""
        return self.packing.documents[self.packing.rows[row] : self.packing.rows[row + 1]]

    def documents_of(self, row: int) -> list[tuple[int, int]]:
        """Returns (start among the tokens, number of inputs) of each document of a row."""
        numbers = self.numbers_of(row)
        starts, ends = self.starts[numbers], self.starts[numbers + 1]
        sizes = np.minimum(ends - starts - 1, self.seq_len)
        return list(zip(starts.tolist(), sizes.tolist(), strict=True))


def second_start(counted: np.ndarray) -> int:
    """Returns where the rejected sequence starts among a pair's tokens, after the chosen one.

    Each starts with tokens of the prompt, which do not count, and ends with those of an answer,
    which do."""
    first = counted.argmax()
    return int(first + (~counted[first:]).argmax())


class PairRows(WholeRows):
    """Rows of T positions with pairs of a chosen and a rejected sequence, none of which is cut.

    A batch also has `PAIRS` (P, 3): where among its
    B x T positions each pair's chosen sequence starts, its rejected one starts, and both end; and
    `SCORES` (P, 2) of `scores` (documents, 2), if it is set.
    """

    def __init__(
        self, corpus: Corpus, split: str, seq_len: int, scores: np.ndarray | None = None
    ) -> None:
        super().__init__(corpus, split, seq_len)
        self.scores = scores  # bits of float32, which no precision plugin casts

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        pairs = []
        for index, row in enumerate(rows):
            sizes = [size for _, size in self.documents_of(row)] if row >= 0 else []
            edges = index * self.seq_len + np.cumsum([0, *sizes])
            pairs += [edges[at : at + 3] for at in range(0, len(sizes), 2)]
        found = np.array(pairs, dtype=np.int64).reshape(-1, 3)
        batch = super().__getitems__(rows) | {PAIRS: torch.from_numpy(found)}
        if self.scores is not None:
            numbers = [number for row in rows if row >= 0 for number in self.numbers_of(row)]
            batch[SCORES] = torch.from_numpy(self.scores[numbers])
        return batch

    def documents_of(self, row: int) -> list[tuple[int, int]]:
        sequences = []
        for pair in self.numbers_of(row):
            start, end = self.starts[pair].item(), self.starts[pair + 1].item()
            middle = start + second_start(self.counted[start:end])
            sequences += [(start, middle - start - 1), (middle, end - middle - 1)]
        return sequences


def last_answers(
    corpus: Corpus, split: str, seq_len: int, number: int
) -> list[tuple[list[int], list[int]]]:
    """Returns the tokens of conversations up to the last answer, and the answer; the chosen one of
    a pair.

    Conversations that fill a sequence are skipped. Plain text has none, and where all tokens are
    trained on, no answer is known.
    """
    found: list[tuple[list[int], list[int]]] = []
    if not corpus.is_whole(split):
        return found
    tokens, counted = corpus.tokens(split), corpus.counted(split)
    for start, end in pairwise(corpus.starts(split).tolist()):
        if len(found) == number:
            break
        if corpus.is_pairs:
            end = start + second_start(counted[start:end])
        first, last = last_turn(counted[start:end])
        if 0 < first < seq_len:
            document = tokens[start:end].tolist()
            found.append((document[:first], document[first:last]))
    return found
