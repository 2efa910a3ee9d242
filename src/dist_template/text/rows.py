"""Reads rows of a token cache as batches, with the boundaries of documents, by which kernels.py
separates them.

Shapes: B sequences, T tokens of a sequence; ids are int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..model.kernels import BOUNDS
from .order import PADDING

NOT_COUNTED = -100  # a label that cross_entropy ignores
ROWS = "rows"  # key of a batch: its rows' numbers, a list, which stays on the host
# Length in tokens of a document whose causal attention costs as much as all else: 12 x a width of
# 1,024. Per layer, attention takes 2 L^2 d operations for L tokens and width d, the rest 24 L d^2.
ATTENTION_TOKENS = 12_288


class PackedRows(Dataset):
    """Rows of T + 1 tokens, read many at a time; a document may continue in the next row.

    The last row ends where the tokens end. It overlaps the one before, whose labels do not count
    again.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        eos_token_id: int,
        cross_document_attention: bool = False,
    ) -> None:
        self.tokens = np.asarray(
            tokens
        )  # still mapped; slicing np.memmap itself takes several times as long
        self.seq_len = seq_len
        self.eos_token_id = eos_token_id
        self.cross_document_attention = cross_document_attention

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.seq_len) if len(self.tokens) > self.seq_len else 0

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        """Returns the batch of these rows, and their numbers; DataLoader calls it once a batch."""
        last = len(self.tokens) - self.seq_len - 1  # start of the last row
        window = np.empty((len(rows), self.seq_len + 1), dtype=np.int64)  # (B, T+1)
        for tokens, row in zip(
            window, rows, strict=True
        ):  # slices: twice as fast as one index array of B x T
            start = min(max(row, 0) * self.seq_len, last)  # a padding row reads any row
            tokens[:] = self.tokens[start : start + self.seq_len + 1]
        inputs, labels = window[:, :-1].copy(), window[:, 1:].copy()  # (B, T) each
        for label, row in zip(labels, rows, strict=True):
            if row == PADDING:
                label[:] = NOT_COUNTED
            elif row * self.seq_len > last:
                label[: row * self.seq_len - last] = NOT_COUNTED
        positions, bounds = self.documents(inputs)
        batch = {"input_ids": inputs, "labels": labels, "position_ids": positions, BOUNDS: bounds}
        return {name: torch.from_numpy(values) for name, values in batch.items()} | {ROWS: rows}

    def work(self, rows: list[int]) -> np.ndarray:
        """Returns (rows,) the work for each row, in tokens; attention's grows with the square of
        each document's length."""
        work = np.full(len(rows), float(self.seq_len))
        if not self.cross_document_attention:
            last = len(self.tokens) - self.seq_len - 1
            for index, start in enumerate(min(row * self.seq_len, last) for row in rows):
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
