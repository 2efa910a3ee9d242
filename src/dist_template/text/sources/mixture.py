"""Mixture: several sources in one corpus, with weights that may change when a run resumes.

The cache holds the documents of one source after another, and so are rows numbered: weights do not
change it. Which row is at a position of the stream of samples follows in closed form. Until
position t, a source with share s(u) of the samples at u has given round(integral of s to t) rows.
Within a block of positions, it is random which source is next; a source's own rows are shuffled
anew for each of its epochs. `interleave_datasets` of `datasets` draws each document at random: it
has no row of a position without reading all before, which a resume on other ranks needs.

    position    0 1 2 3 4 5 6 7 | 8 …          blocks of `BLOCK` samples
    rows of     w w c w w w c w | …            web (weight 3) and code (weight 1)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from ...callbacks.global_order import shuffled
from ...errors import InputError
from .documents import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

BLOCK = 256  # samples among which the sources are shuffled
Weights = dict[str, float]


@dataclass
class Mixture(Source):
    """Several sources; each gives its share of the samples.

    Args:
        sources: Sources by name. All are conversations, or none is.
        weights: Weight of each source by name; their sum does not matter."""

    sources: dict[str, Source]
    weights: dict[str, float]

    def __post_init__(self) -> None:
        kinds = {(source.whole, source.pairs, source.ratings) for source in self.sources.values()}
        self.whole, self.pairs, self.ratings = max(kinds, default=(False, False, False))
        if len(kinds) > 1:
            what = "conversations and plain text, or preferences besides, or ratings"
            raise InputError(f"data.source.sources has {what}: train on one after the other")
        values = list(self.weights.values())
        if self.weights.keys() != self.sources.keys() or not any(values) or min(values) < 0:
            raise InputError(
                f"data.source.weights is {self.weights}: give each of {', '.join(self.sources)} a"
                " number of at least 0, and not 0 to all"
            )

    def parts(self) -> dict[str, Source]:
        return self.sources

    def documents(self) -> Iterator[tuple[str, str]]:
        for source in self.sources.values():
            yield from source.documents()

    def files(self) -> list[Path]:
        files: list[Path] = []
        for source in self.sources.values():
            files += source.files()
        return files

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        for source in self.sources.values():
            tokenizer = source.prepare_tokenizer(tokenizer)
        return tokenizer

    def encode_prompt(self, tokenizer: Tokenizer, prompt: str) -> list[int]:
        return next(iter(self.sources.values())).encode_prompt(tokenizer, prompt)

    def spec(self) -> dict[str, object]:
        parts = {name: source.spec() for name, source in self.sources.items()}
        return {"class": "Mixture", "sources": parts}


@dataclass
class MixtureOrder:
    """Maps a position of the stream to the number of its row."""

    sizes: dict[str, int]  # number of rows of each source, in the order in which rows are numbered
    # pairs of a position and the weights from there on; the first is at 0
    changes: list[tuple[int, Weights]]
    seed: int  # of the shuffles

    def __post_init__(self) -> None:
        self._starts: dict[str, int] = {}  # the first row of each source
        self._rows: dict[str, Callable[[int], np.ndarray]] = {}  # its order in an epoch
        start = 0
        for name, size in self.sizes.items():
            self._starts[name] = start
            start += size
            # a source's order depends on its name, not on the other sources
            order = partial(shuffled, size, self.seed, crc32(name.encode()))
            self._rows[name] = lru_cache(maxsize=2)(order)
        self._block = np.zeros(0, dtype=np.int64)  # rows of the newest block
        self._first = 0  # its first position

    def __call__(self, position: int) -> int:
        if not 0 <= position - self._first < len(self._block):
            number = self._number(position)
            self._block = self._rows_of_block(number)
            self._first = self._start(number)
        return int(self._block[position - self._first])

    def given(self, name: str, position: int) -> int:
        """Returns how many samples of a source are before that position, if a block ends there."""
        total = Fraction(1, 2)  # exact: a sum of floats would depend on how it is divided
        end = position
        for start, weights in reversed(self.changes):
            if start < end:
                share = Fraction(weights.get(name, 0)) / sum(map(Fraction, weights.values()))
                total += (end - start) * share
                end = start
        return math.floor(total)

    def epochs(self, position: int) -> dict[str, float]:
        """Returns how often each source was read, as metrics."""
        metrics = {}
        for name, size in self.sizes.items():
            metrics[f"data/{name}/epochs"] = self.given(name, position) / size
        return metrics

    def resume(self, changes: list[tuple[int, Weights]], position: int) -> None:
        """Continues a run that had these changes: other weights take effect at the next block."""
        _, weights = self.changes[-1]  # those of the present configuration
        self.changes = [(start, before) for start, before in changes]  # as tuples
        if weights != self.changes[-1][1]:
            at = 0
            if position:
                newest = self._number(position - 1)  # the block that was read last
                at = (newest + 1) * BLOCK
            self.changes = [change for change in self.changes if change[0] < at]
            self.changes.append((at, weights))
        self._block = self._block[:0]

    def _start(self, block: int) -> int:
        """Returns the block's first position."""
        names: set[str] = set()  # a change may add a source
        for _, weights in self.changes:
            names.update(weights)
        return sum(self.given(name, block * BLOCK) for name in names)

    def _number(self, position: int) -> int:
        """Returns the block of a position: rounding moves a block's start by at most a few."""
        block = position // BLOCK
        while self._start(block) > position:
            block -= 1
        while self._start(block + 1) <= position:
            block += 1
        return block

    def _rows_of_block(self, block: int) -> np.ndarray:
        rows: list[list[int]] = []  # of each source, in its order
        for name, size in self.sizes.items():
            of_source = []
            start, end = self.given(name, block * BLOCK), self.given(name, (block + 1) * BLOCK)
            for sample in range(start, end):
                epoch, at = divmod(sample, size)
                order = self._rows[name](epoch)
                of_source.append(self._starts[name] + int(order[at]))
            rows.append(of_source)
        sources = np.repeat(range(len(rows)), list(map(len, rows)))
        sources = np.random.default_rng((self.seed, block)).permutation(sources)
        order = np.zeros(len(sources), dtype=np.int64)
        for source, numbers in enumerate(rows):
            order[sources == source] = numbers
        return order
