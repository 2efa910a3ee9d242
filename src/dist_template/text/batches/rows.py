"""Reads rows of a token cache as batches, with the boundaries of documents, by which kernels.py
separates them.

Shapes: B sequences, T tokens of a sequence; ids are int64.
"""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ...model.metrics import NOT_COUNTED
from ..model.kernels import BOUNDS

ROWS = "rows"  # key of a batch: its rows' numbers, a list, which stays on the host
PAIRS = "pairs"  # key of a batch of pairs: where they are in it (packing.py)
SCORES = "reference_scores"  # likewise: log-probabilities that were computed before training
# Length in tokens of a document whose causal attention costs as much as all else: 12 x a width of
# 1,024. Per layer, attention takes 2 L^2 d operations for L tokens and width d, the rest 24 L d^2.
ATTENTION_TOKENS = 12_288


class Rows(Dataset):
    """Rows of T tokens, read many at a time. Subclasses say where the documents are.

    `sizes` has the number of rows of each source, in the order in which rows are numbered.
    """

    def __init__(
        self, tokens: np.ndarray, seq_len: int, eos_token_id: int, cross_document_attention: bool
    ) -> None:
        # still mapped; slicing np.memmap itself takes several times as long
        self.tokens = np.asarray(tokens)
        self.seq_len = seq_len
        self.eos_token_id = eos_token_id
        self.cross_document_attention = cross_document_attention
        self.sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(self.sizes.values())

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        """Returns the batch of these rows, and their numbers; DataLoader calls it once a batch.

        Positions (B, T) count from each document's start. Boundaries (documents + 1,) are the
        documents' starts among the B x T tokens, and B x T. With `cross_document_attention` a row
        is one document, without boundaries.
        """
        inputs, labels, bounds = self.read(rows)
        if self.cross_document_attention:
            bounds = np.zeros(0, dtype=np.int32)
            positions = np.tile(np.arange(self.seq_len), (len(rows), 1))
        else:
            positions = np.arange(inputs.size) - np.repeat(bounds[:-1], np.diff(bounds))
            positions = positions.reshape(inputs.shape)
        batch = {"input_ids": inputs, "labels": labels, "position_ids": positions, BOUNDS: bounds}
        return {name: torch.from_numpy(values) for name, values in batch.items()} | {ROWS: rows}

    def work(self, rows: list[int]) -> np.ndarray:
        """Returns (rows,) the work for each row, in tokens; attention's grows with the square of
        each document's length."""
        work = np.full(len(rows), float(self.seq_len))
        if not self.cross_document_attention:
            for index, row in enumerate(rows):
                work[index] += np.square(self.lengths(row), dtype=np.int64).sum() / ATTENTION_TOKENS
        return work

    def read(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns inputs (B, T), labels (B, T) and the boundaries of documents as int32."""
        raise NotImplementedError

    def lengths(self, row: int) -> np.ndarray:
        """Returns the lengths of a row's documents; padding is one too."""
        raise NotImplementedError


class PackedRows(Rows):
    """Rows of T + 1 tokens; a document may continue in the next row.

    The last row ends where the tokens end. It overlaps the one before, whose labels do not count
    again. Of a mixture, each source has rows of its own; `parts` has their numbers of tokens.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        eos_token_id: int,
        cross_document_attention: bool = False,
        parts: dict[str, int] | None = None,
    ) -> None:
        super().__init__(tokens, seq_len, eos_token_id, cross_document_attention)
        parts = parts or {"": len(tokens)}
        self.sizes = {
            name: -(-(num - 1) // seq_len) if num > seq_len else 0 for name, num in parts.items()
        }
        self._row_ends = [*accumulate(self.sizes.values())]
        self._token_ends = [*accumulate(parts.values())]

    def read(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        window = np.empty((len(rows), self.seq_len + 1), dtype=np.int64)  # (B, T+1)
        places = [self._place(max(row, 0)) for row in rows]  # a padding row reads any row
        for tokens, (start, _) in zip(window, places, strict=True):
            # slices: twice as fast as one index array of B x T
            tokens[:] = self.tokens[start : start + self.seq_len + 1]
        inputs, labels = window[:, :-1].copy(), window[:, 1:].copy()  # (B, T) each
        for label, row, (_, overlap) in zip(labels, rows, places, strict=True):
            label[: overlap if row >= 0 else None] = NOT_COUNTED
        return inputs, labels, self._bounds(inputs)

    def lengths(self, row: int) -> np.ndarray:
        start, _ = self._place(row)
        return np.diff(self._bounds(self.tokens[None, start : start + self.seq_len]))

    def _bounds(self, inputs: np.ndarray) -> np.ndarray:
        """Returns the boundaries of documents: EOS ends one, and so does a row."""
        ends = inputs == self.eos_token_id
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
