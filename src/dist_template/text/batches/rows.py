"""Reads rows of a token cache as batches, with the boundaries of documents, by which kernels.py
separates them.

Plain text fills rows completely (PackedRows). Documents that are not cut, such as conversations,
are packed into rows (WholeRows): a document of n tokens takes n - 1 positions, each with the next
token as its label, and the rest of a row is padding. Documents do not attend to each other.

Shapes: B sequences, T tokens of a sequence; ids are int64."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from ...model.metrics import NOT_COUNTED
from ..cache.token_cache import Corpus
from ..model.kernels import BOUNDS
from ..sources.chat_template import last_turn

ROWS = "rows"  # key of a batch: its rows' numbers, a list, which stays on the host
PAIRS = "pairs"  # key of a batch of pairs: where they are in it (PairRows)
# Length in tokens of a document whose causal attention costs as much as all else: 12 x a width of
# 1,024. Per layer, attention takes 2 L^2 d operations for L tokens and width d, the rest 24 L d^2.
ATTENTION_TOKENS = 12_288


@dataclass(eq=False)
class Rows(Dataset):
    """Rows of T tokens, read many at a time. Subclasses say where the documents are.

    `sizes` has the number of rows of each source, in the order in which rows are numbered."""

    tokens: np.ndarray
    seq_len: int
    eos_token_id: int
    cross_document_attention: bool = False

    def __post_init__(self) -> None:
        # still mapped; slicing np.memmap itself takes several times as long
        self.tokens = np.asarray(self.tokens)
        self.sizes: dict[str, int] = {}
        self.attention_tokens: float = ATTENTION_TOKENS  # of the model that is trained

    def __len__(self) -> int:
        return sum(self.sizes.values())

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        """Returns the batch of these rows, and their numbers; DataLoader calls it once a batch.
        Positions (B, T) count from each document's start. Boundaries (documents + 1,) are the
        documents' starts among the B x T tokens, and B x T. With `cross_document_attention` a row
        is one document, without boundaries."""
        inputs, labels, bounds = self.read(rows)
        if self.cross_document_attention:
            bounds = np.zeros(0, dtype=np.int32)
            positions = np.tile(np.arange(self.seq_len), (len(rows), 1))
        else:
            positions = np.arange(inputs.size) - np.repeat(bounds[:-1], np.diff(bounds))
            positions = positions.reshape(inputs.shape)
        arrays = {"input_ids": inputs, "labels": labels, "position_ids": positions, BOUNDS: bounds}
        batch: dict[str, Any] = {}
        for name, values in arrays.items():
            batch[name] = torch.from_numpy(values)
        batch[ROWS] = rows
        return batch

    def work(self, rows: list[int]) -> np.ndarray:
        """Returns (rows,) the work for each row, in tokens. Attention's grows with the square of
        each document's length."""
        work = np.full(len(rows), float(self.seq_len))
        if not self.cross_document_attention:
            for index, row in enumerate(rows):
                squares = np.square(self.lengths(row), dtype=np.int64).sum()
                work[index] += squares / self.attention_tokens
        return work

    def read(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns inputs (B, T), labels (B, T) and the boundaries of documents as int32."""
        raise NotImplementedError

    def lengths(self, row: int) -> np.ndarray:
        """Returns the lengths of a row's documents; padding is one too."""
        raise NotImplementedError


@dataclass(eq=False)
class PackedRows(Rows):
    """Rows of T + 1 tokens; a document may continue in the next row.

    The last row ends where the tokens end. It overlaps the one before, whose labels do not count
    again. Of a mixture, each source has rows of its own; `parts` has their numbers of tokens.
    `start_ids` are the tokens that each document starts with, such as BOS."""

    parts: dict[str, int] | None = None
    start_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.parts or {"": len(self.tokens)}
        for name, num_tokens in parts.items():
            self.sizes[name] = 0
            if num_tokens > self.seq_len:
                self.sizes[name] = -(-(num_tokens - 1) // self.seq_len)
        self._row_ends = list(accumulate(self.sizes.values()))
        self._token_ends = list(accumulate(parts.values()))

    def read(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        window = np.empty((len(rows), self.seq_len + 1), dtype=np.int64)  # (B, T+1)
        overlaps = []
        for tokens, row in zip(window, rows, strict=True):
            start, overlap = self._place(max(row, 0))  # a padding row reads any row
            overlaps.append(overlap if row >= 0 else self.seq_len)
            # slices: twice as fast as one index array of B x T
            tokens[:] = self.tokens[start : start + self.seq_len + 1]
        inputs, labels = window[:, :-1].copy(), window[:, 1:].copy()  # (B, T) each
        for label, overlap in zip(labels, overlaps, strict=True):
            label[:overlap] = NOT_COUNTED
        return inputs, labels, self._bounds(window)

    def lengths(self, row: int) -> np.ndarray:
        start, _ = self._place(row)
        return np.diff(self._bounds(self.tokens[None, start : start + self.seq_len + 1]))

    def _bounds(self, window: np.ndarray) -> np.ndarray:
        """Returns the boundaries of documents in the first T of T + 1 tokens: EOS ends one, and so
        does a row. Where EOS is BOS too (OPT), it ends one only before the next document."""
        ends = window[:, :-1] == self.eos_token_id
        if self.eos_token_id in self.start_ids:
            ends &= window[:, 1:] == self.start_ids[0]
        ends[:, -1] = True
        return np.append(0, np.flatnonzero(ends) + 1).astype(np.int32)

    def _place(self, row: int) -> tuple[int, int]:
        """Returns a row's start among the tokens, and how many labels the row before has too."""
        part = bisect(self._row_ends, row)
        first_row = self._row_ends[part - 1] if part else 0
        first_token = self._token_ends[part - 1] if part else 0
        start = first_token + (row - first_row) * self.seq_len
        last = self._token_ends[part] - self.seq_len - 1
        return min(start, last), max(0, start - last)


class Packing(NamedTuple):
    """Assignment of documents to rows."""

    documents: np.ndarray  # numbers of documents, row by row
    rows: np.ndarray  # (rows + 1,) starts of the rows in `documents`, and its length
    share: float  # of the positions of all rows that documents fill
    num_cut: int  # documents that are longer than a row and cut
    num_dropped: int  # documents without a counted label in what a row holds of them
    sizes: dict[str, int]  # number of rows of each source of a mixture, in order

    def describe(self, split: str) -> str:
        line = f"  {split:<10} {len(self.rows) - 1:>9,} rows, {self.share:.1%} full"
        if self.num_cut or self.num_dropped:
            line += (
                f"; longer than a row: {self.num_cut:,} cut, {self.num_dropped:,} without an"
                " answer dropped"
            )
        return line


def best_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Packs items into bins by best fit decreasing, which is deterministic.

    The longest item comes first, into the bin in which it leaves the least space. The set of free
    spaces that some bin has is the bits of one integer, so a million items take seconds.

    Returns the items of each bin in ascending order; the bins in the order of their first item.
    `sizes` (items,) are from 1 to `capacity`, the size of a bin."""
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


def packing_of(corpus: Corpus, split: str, seq_len: int, reads_ends: bool = False) -> Packing:
    """Returns the rows of a split whose documents are whole; `corpus` keeps them. `reads_ends`: see
    PairRows."""
    known = corpus.packings.get((split, seq_len, reads_ends))
    if known is not None:
        return known
    starts, counted = corpus.starts(split), corpus.counted(split)
    needed = np.diff(starts) - 1 + reads_ends  # (documents,) positions
    is_cut, kept = needed > seq_len, needed > 0
    for document in np.flatnonzero(is_cut):
        first = starts[document] + 1
        kept[document] = not corpus.is_pairs and counted[first : first + seq_len].any()
    numbers = np.flatnonzero(kept)
    lengths = np.minimum(needed, seq_len)[numbers]
    rows: list[list[int]] = []  # of indices in `numbers`
    sizes, end = {}, 0
    for name, part in corpus.parts(split).items():  # a row has documents of one source
        start, end = end, end + part["documents"]
        low, high = np.searchsorted(numbers, [start, end]).tolist()
        packed = best_fit(lengths[low:high], seq_len)
        for row in packed:
            rows.append([low + item for item in row])
        sizes[name] = len(packed)
    num_dropped = int((is_cut & ~kept).sum())
    packing = Packing(
        documents=numbers[np.fromiter(chain.from_iterable(rows), dtype=np.int64)],
        rows=np.cumsum([0, *map(len, rows)]),
        share=float(lengths.sum() / max(1, len(rows) * seq_len)),
        num_cut=int(is_cut.sum()) - num_dropped,
        num_dropped=num_dropped,
        sizes=sizes,
    )
    corpus.packings[split, seq_len, reads_ends] = packing
    return packing


class WholeRows(Rows):
    """Rows of T positions with whole documents; the rest of a row is padding.

    Only a document that is longer than a row is cut, to its beginning."""

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        seq_len: int,
        cross_document_attention: bool = False,
        reads_ends: bool = False,
    ) -> None:
        end = corpus.manifest["eos_token_id"]
        super().__init__(corpus.tokens(split), seq_len, end, cross_document_attention)
        self.packing = packing_of(corpus, split, seq_len, reads_ends)
        self.reads_ends = reads_ends
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
                inputs.flat[end : end + size] = tokens[:size]
                if row >= 0:
                    counted = self.counted[start + 1 : start + size + 1]
                    following = np.where(counted, tokens[1:], NOT_COUNTED)
                    labels.flat[end : end + len(following)] = following
                end += size
                bounds.append(end)
            row_end = (index + 1) * self.seq_len
            if end < row_end:  # padding is a document too
                bounds.append(row_end)
        return inputs, labels, np.array(bounds, dtype=np.int32)

    def lengths(self, row: int) -> np.ndarray:
        lengths = [size for _, size in self.documents_of(row)]
        lengths.append(self.seq_len - sum(lengths))
        return np.array(lengths)

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
    """Returns where the rejected sequence starts among a pair's tokens, after the chosen one. Each
    starts with tokens of the prompt, which do not count, and ends with tokens of an answer, which
    do. The first is a verdict."""
    first = 1 + counted[1:].argmax()
    return int(first + (~counted[first:]).argmax())


class PairRows(WholeRows):
    """Rows of T positions with pairs of a chosen and a rejected sequence, which are never cut.

    A batch also has `PAIRS` (P, 4): where among its B x T positions each pair's chosen sequence
    starts, its rejected one starts, and both end; and 1 where a rated answer was found good.

    With `reads_ends` the last token of a sequence, at which a reward model is read, is an input
    too."""

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        batch, pairs = super().__getitems__(rows), []
        for index, row in enumerate(rows):
            if row < 0:
                continue
            start = index * self.seq_len
            sizes = [size for _, size in self.documents_of(row)]
            found_good = self.counted[self.starts[self.numbers_of(row)]]
            for chosen, rejected, good in zip(sizes[::2], sizes[1::2], found_good, strict=True):
                middle = start + chosen
                end = middle + rejected
                pairs.append((start, middle, end, int(good)))
                start = end
        batch[PAIRS] = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 4)
        return batch

    def documents_of(self, row: int) -> list[tuple[int, int]]:
        sequences = []
        for pair in self.numbers_of(row):
            start, end = self.starts[pair].item(), self.starts[pair + 1].item()
            middle = start + second_start(self.counted[start:end])
            unread = 0 if self.reads_ends else 1  # the last token is a label alone
            sequences.append((start, middle - start - unread))
            sequences.append((middle, end - middle - unread))
        return sequences


def last_answers(corpus: Corpus, split: str, seq_len: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the tokens of conversations up to the last answer, and the answer; the chosen one of a
    pair. Conversations that fill a sequence are skipped. Where all tokens are trained on, no answer
    is known."""
    tokens, counted = corpus.tokens(split), corpus.counted(split)
    for start, end in pairwise(corpus.starts(split).tolist()):
        if start == end:  # it was dropped
            continue
        if corpus.is_pairs:
            end = start + second_start(counted[start:end])
        first, last = last_turn(counted[start:end])
        if 0 < first < seq_len:
            document = tokens[start:end].tolist()
            yield document[:first], document[first:last]
