"""Ends a generation at a stop string, or when its client no longer waits for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEFORE = 8  # further tokens that are decoded: a decoder may strip the first one's space


class RequestEnd:
    """Stopping criterion of one request, for one row of tokens.

    transformers' StopStringCriteria lists, for each request, how every token of the vocabulary may
    overlap a string: seconds and hundreds of megabytes for 150,000 tokens. Here the last tokens are
    decoded at each step; a string of n bytes is in n tokens or fewer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.is_over = threading.Event()  # set: the generation ends at its next token
        self.strings: list[str] = []
        self.generated = 0  # tokens
        self._tokenizer = tokenizer

    def __call__(self, tokens: Tensor, scores: object) -> Tensor:
        self.generated += 1  # transformers calls it after each token
        is_over = self.is_over.is_set()
        if self.strings:
            window = max(len(each.encode()) for each in self.strings) + BEFORE
            text = self._tokenizer.decode(tokens[0, -min(window, self.generated) :])
            is_over |= any(each in text for each in self.strings)
        return torch.full((1,), is_over, device=tokens.device)
