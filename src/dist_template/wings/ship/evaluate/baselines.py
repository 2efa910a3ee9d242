"""Baselines without a model: n-grams of tokens, and compression."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import numpy as np

from ....text.cache.token_cache import Corpus

if TYPE_CHECKING:
    from pandas import DataFrame

ORDERS = {"unigram": 1, "ngram": 3}
NAMES = (*ORDERS, "compression")
TRAIN_TOKENS, WINDOW = 2**24, 2**15  # of the train split: counted tokens, tokens for zlib
PRIOR = 5.0  # pseudo-counts of the shorter n-gram's distribution


def scored(name: str, corpus: Corpus, split: str, table: DataFrame) -> DataFrame:
    """Returns a model's table of documents with a baseline's nats: it knows the train split."""
    train = np.asarray(corpus.tokens("train")[:TRAIN_TOKENS])
    if name == "compression":
        window = str(corpus.tokenizer.decode(train[:WINDOW].tolist())).encode()[-WINDOW:]
        bits = []
        for text in table["text"]:
            packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS, zdict=window)
            bits.append(8 * len(packer.compress(text.encode()) + packer.flush()))
        return table.assign(nats=np.array(bits) * math.log(2))
    tokens, vocab_size = np.asarray(corpus.tokens(split)), corpus.manifest["vocab_size"]
    of_token = ngram_bits(tokens, train, vocab_size, ORDERS[name])
    if corpus.is_whole(split):
        of_token *= corpus.counted(split)
    starts = np.append(0, table["end"][:-1])
    return table.assign(nats=np.add.reduceat(of_token, starts) * math.log(2))


def ngram_bits(tokens: np.ndarray, train: np.ndarray, vocab_size: int, order: int) -> np.ndarray:
    """Returns (T,) bits of each token, given the `order` - 1 tokens before it.

    P(w | h) = (count(h w) + a P(w | shorter h)) / (count(h) + a): MacKay and Peto, "A hierarchical
    Dirichlet language model", 1995.
    """
    counts = np.bincount(train, minlength=vocab_size) + 1
    probability = counts[tokens] / counts.sum()
    for n in range(2, order + 1):
        count = _counts(_grams(train, n), _grams(tokens, n))
        total = _counts(_grams(train[:-1], n - 1), _grams(tokens[:-1], n - 1))
        probability[n - 1 :] = (count + PRIOR * probability[n - 1 :]) / (total + PRIOR)
    return -np.log2(probability)


def _grams(tokens: np.ndarray, n: int) -> np.ndarray:
    """Returns one number for each `n` <= 3 consecutive tokens, of a vocabulary up to 2**21."""
    wide = tokens.astype(np.uint64)
    return sum(wide[i : len(wide) - n + 1 + i] << np.uint64(21 * i) for i in range(n))


def _counts(known: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns how often each value of `wanted` is in `known`."""
    values, counts = np.unique(known, return_counts=True)
    index = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return np.where(values[index] == wanted, counts[index], 0)
