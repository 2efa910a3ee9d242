"""Texts to token ids: in this process while there are few, then in a process per core.

`tokenizers` has threads of its own, and this process uses them. But what Python does for each token, to make an array
of a list, has one core then, as much as some twenty cores of BPE need. Processes divide that too.

The tokens do not depend on how many processes there are: batches come back in the order in which they went.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from ..cluster.signals import end_with_parent
from ..errors import InputError
from .cache import SPLITS, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH_CHARACTERS = 2**20  # encoded together: a fraction of a second, some ten MB of memory
FEW = 16  # batches that do not pay for starting processes
MOST_PROCESSES = 32  # a billion tokens in half a minute; login nodes, where data are prepared, have other users too


@dataclass(frozen=True)
class Encoded:
    """A batch's documents of one split."""

    documents: int
    bytes: int  # of UTF-8 text
    ids: np.ndarray  # (tokens,) in the cache's dtype, EOS after each document


class Encoder:
    """What is done to each batch, here or in another process."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)

    def __call__(self, texts: list[str]) -> dict[str, Encoded]:
        """Split -> its documents' tokens, in the order of `texts`."""
        splits = [self.recipe.split_of(text) for text in texts]
        encoded = self.recipe.tokenizer.encode(self.tokenizer, texts)
        end = np.array([self.tokenizer.eos_token_id])
        found = {}
        for split in SPLITS:
            mine = [index for index, of in enumerate(splits) if of == split]
            parts = chain.from_iterable((encoded[index], end) for index in mine)
            ids = np.concatenate([end[:0], *parts]).astype(self.dtype)
            found[split] = Encoded(len(mine), sum(len(texts[index].encode()) for index in mine), ids)
        return found


def encode(encoder: Encoder, texts: Iterator[str], processes: int | None = None) -> Generator[dict[str, Encoded]]:
    """What `encoder` makes of `texts`, batch by batch, in their order.

    Args:
        encoder: What to do.
        texts: Read here, as fast as they are encoded.
        processes: To divide the work among. None: one per core that this process may use.

    Raises:
        InputError: the system killed one of the processes.
    """
    batches = _batches(texts)
    few = list(islice(batches, FEW))
    yield from map(encoder, few)
    processes = processes or min(_cores(), MOST_PROCESSES)
    if len(few) < FEW or processes == 1:
        yield from map(encoder, batches)
    else:
        yield from _divided(encoder, batches, processes)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _divided(encoder: Encoder, batches: Iterator[list[str]], processes: int) -> Generator[dict[str, Encoded]]:
    # For the processes, which have a core each. Also what `tokenizers` wants to be told before a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context(), _begin, (encoder,))
    sent: deque[tuple[list[str], Future[dict[str, Encoded]]]] = deque()
    try:
        for batch in batches:
            sent.append((batch, pool.submit(_encode, batch)))
            if len(sent) > 2 * processes:  # no more: memory stays bounded, and nobody waits
                yield _result(encoder, *sent.popleft())
        while sent:
            yield _result(encoder, *sent.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _result(encoder: Encoder, batch: list[str], future: Future[dict[str, Encoded]]) -> dict[str, Encoded]:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise InputError(
            "the system killed a process that tokenized, for want of memory as a rule: use fewer (`taskset -c 0-3`"
            " before the command gives it four cores), or a machine with more memory"
        ) from error
    except Exception:
        return encoder(batch)  # fails again, here, where the error has the user's own lines


_encoder: Callable[[list[str]], dict[str, Encoded]]  # in each process of the pool


def _begin(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; who started us ends us
    end_with_parent(signal.SIGTERM)  # also when it is killed


def _encode(texts: list[str]) -> dict[str, Encoded]:
    return _encoder(texts)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
