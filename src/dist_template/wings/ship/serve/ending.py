"""Ends a generation at a stop string, or when no client waits for it any more."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

BEFORE = 8  # further tokens that are decoded: a decoder may strip the first one's space


class Ending:
    """Stopping criterion of one request.

    transformers' StopStringCriteria lists, for each request, how every token of the vocabulary may
    overlap a string: seconds and hundreds of megabytes for 150,000 tokens. Here the last tokens are
    decoded at each step; a string of n bytes is in n tokens or fewer.

    Args:
        tokenizer: Decodes the tokens; None without stop strings.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self.is_over = threading.Event()  # set: the generation ends at its next token
        self.strings: list[str] = []
        self._tokenizer, self._prompt = tokenizer, -1

    def __call__(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        if self._prompt < 0:  # called first after one new token
            self._prompt = tokens.shape[1] - 1
        found = [self.is_over.is_set()] * len(tokens)
        if self.strings:
            window = max(len(each.encode()) for each in self.strings) + BEFORE
            first = max(self._prompt, tokens.shape[1] - window)
            texts = self._tokenizer.batch_decode(tokens[:, first:])
            found = [
                over or self._has_string(text) for over, text in zip(found, texts, strict=True)
            ]
        return torch.tensor(found, device=tokens.device)

    def _has_string(self, text: str) -> bool:
        return any(each in text for each in self.strings)
