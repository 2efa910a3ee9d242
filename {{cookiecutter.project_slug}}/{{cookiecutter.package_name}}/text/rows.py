"""Rows of a token cache, and batches of them, with where documents begin: kernels.py keeps them apart by it.

Shapes: B sequences, T tokens of a sequence; ids are int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..kernels import BOUNDS
from .order import NOT_COUNTED, PADDING, ROWS


class PackedRows(Dataset):
    """Rows of T + 1 tokens, read many at a time; documents run on from row to row."""

    def __init__(
        self, tokens: np.ndarray, seq_len: int, eos_token_id: int, cross_document_attention: bool = False
    ) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.eos_token_id = eos_token_id
        self.cross_document_attention = cross_document_attention

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_len

    def __getitems__(self, rows: list[int]) -> dict[str, Any]:
        """The batch of these rows, and their numbers; DataLoader calls this once per batch."""
        index = np.asarray(rows)  # (B,)
        starts = np.where(index == PADDING, 0, index)[:, None] * self.seq_len  # a padding row reads any row
        window = self.tokens[starts + np.arange(self.seq_len + 1)].astype(np.int64)  # (B, T+1)
        inputs, labels = window[:, :-1], window[:, 1:].copy()  # (B, T) each
        labels[index == PADDING] = NOT_COUNTED
        positions = self.positions(inputs)
        bounds = np.append(np.flatnonzero(positions == 0), positions.size).astype(np.int32)  # (documents + 1,)
        batch = {"input_ids": inputs, "labels": labels, "position_ids": positions, BOUNDS: bounds}
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in batch.items()} | {ROWS: rows}

    def positions(self, inputs: np.ndarray) -> np.ndarray:
        """(B, T), counted from each document's start; attention tells documents apart by it."""
        positions = np.broadcast_to(np.arange(self.seq_len), inputs.shape)
        if self.cross_document_attention:
            return positions
        starts = np.zeros_like(inputs)
        starts[:, 1:] = np.where(inputs[:, :-1] == self.eos_token_id, positions[:, 1:], 0)
        return positions - np.maximum.accumulate(starts, axis=1)
