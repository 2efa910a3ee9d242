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

from ..model.kernels import BOUNDS

NOT_COUNTED = -100  # a label that cross_entropy ignores
ROWS = "rows"  # key of a batch: its rows' numbers, a list, which stays on the host
PAIRS = "pairs"  # key of a batch of pairs: where they are in it (packing.py)
# Length in tokens of a document whose causal attention costs as much as all else: 12 x a width of
# 1,024. Per layer, attention takes 2 L^2 d operations for L tokens and width d, the rest 24 L d^2.
ATTENTION_TOKENS = 12_288


class PackedRows(Dataset):
    """Rows of T + 1 tokens, read many at a time; a document may continue in the next row.

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
        self.tokens = np.asarray(
            tokens
        )  # still mapped; slicing np.memmap itself takes several times as long
        self.seq_len = seq_len
        self.eos_token_id = eos_token_id
        self.cross_document_attention = cross_document_attention
        parts = parts or {"": len(tokens)}
        self.sizes = {  # number of rows of each source
            name: -(-(num - 1) // seq_len) if num > seq_len else 0 for name, num in parts.items()
        }
        self._row_ends = [*accumulate(self.sizes.values())]
        self._token_ends = [*accumulate(parts.values())]

    def __len__(self) -> int:
        return self._row_ends[-1]

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        """Returns the batch of these rows, and their numbers; DataLoader calls it once a batch."""
        window = np.empty((len(rows), self.seq_len + 1), dtype=np.int64)  # (B, T+1)
        places = [self._place(max(row, 0)) for row in rows]  # a padding row reads any row
        for tokens, (start, _) in zip(window, places, strict=True):
            # slices: twice as fast as one index array of B x T
            tokens[:] = self.tokens[start : start + self.seq_len + 1]
        inputs, labels = window[:, :-1].copy(), window[:, 1:].copy()  # (B, T) each
        for label, row, (_, overlap) in zip(labels, rows, places, strict=True):
            label[: overlap if row >= 0 else None] = NOT_COUNTED
        positions, bounds = self.documents(inputs)
        batch = {"input_ids": inputs, "labels": labels, "position_ids": positions, BOUNDS: bounds}
        return {name: torch.from_numpy(values) for name, values in batch.items()} | {ROWS: rows}

    def _place(self, row: int) -> tuple[int, int]:
        """Returns a row's start among the tokens, and how many labels the row before has too."""
        part = bisect(self._row_ends, row)
        first_row = self._row_ends[part - 1] if part else 0
        first_token = self._token_ends[part - 1] if part else 0
        start = first_token + (row - first_row) * self.seq_len
        last = self._token_ends[part] - self.seq_len - 1
        return min(start, last), max(0, start - last)

    def work(self, rows: list[int]) -> np.ndarray:
        """Returns (rows,) the work for each row, in tokens; attention's grows with the square of
        each document's length."""
        work = np.full(len(rows), float(self.seq_len))
        if not self.cross_document_attention:
            for index, (start, _) in enumerate(map(self._place, rows)):
                ends = self.tokens[start : start + self.seq_len - 1] == self.eos_token_id
                bounds = np.concatenate(([0], np.flatnonzero(ends) + 1, [self.seq_len]))
                work[index] += np.square(np.diff(bounds)).sum() / ATTENTION_TOKENS
        return work

    def documents(self, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns positions and boundaries of documents; with `cross_document_attention` a row is
        one document.

        Positions (B, T) count from each document's start. Boundaries (documents + 1,) are the
        documents' starts among the B x T tokens, and B x T.
        """
        if self.cross_document_attention:
            return one_document_per_row(inputs.shape)
        ends = inputs == self.eos_token_id
        ends[:, -1] = True
        return apart(np.concatenate(([0], np.flatnonzero(ends) + 1)), inputs.shape)


def one_document_per_row(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions and boundaries of rows in which all tokens attend to each other."""
    return np.tile(np.arange(shape[1]), (shape[0], 1)), np.zeros(0, dtype=np.int32)


def apart(bounds: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions (B, T) and boundaries of documents with these starts and end."""
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
    return positions.reshape(shape), np.asarray(bounds, dtype=np.int32)
