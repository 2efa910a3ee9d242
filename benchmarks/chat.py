"""Conversations: how full their rows are, how long packing takes, and what a training on them costs.

Lengths are log-normal, with medians and widths of published sets. Training: a model of 5M parameters on
masked rows of whole conversations, beside rows of the same documents one after another in which every label counts.

Targets: 0.98 of all places filled; a million conversations packed in 20 s; 0.97 of the tokens per second.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from dist_template.text.batches.rows import PackedRows, WholeRows, best_fit
from dist_template.text.cache.token_cache import Corpus

from .arms import Clock, Comparison, Sample, compare
from .loops import project
from .loops.task import LARGE, Task, prepare
from .record import Figure, Options, Result

NAME = "chat"
SETS = {  # median and width of the lengths, tokens of a row
    "short questions": (60, 1.2, 1024),
    "assistants": (250, 0.9, 2048),
    "long answers": (700, 0.8, 4096),
}
EOS = 256


def run(options: Options) -> Result:
    result = Result(NAME)
    number = 2_000 if options.quick else 100_000
    for name, (median, sigma, row) in SETS.items():
        sizes = lengths(number, median, sigma, row)
        share = sizes.sum() / (len(best_fit(sizes, row)) * row)
        result.figures.append(Figure(f"{name}, rows of {row}: share of places filled", [share], at_least=0.98))
    clock = Clock()
    clock.start()
    best_fit(lengths(10 * number, 250, 0.9, 4096), 4096)
    result.figures.append(Figure(f"packing {10 * number:,}", [clock.stop().cpu_s], at_most=20, unit="s"))
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison("5M model", "optimizer step", "every label counts")
        arms, share = _trainings(Path(folder), options.quick)
        compare(comparison, arms, rounds=options.rounds, warm=not options.quick)
    ratios = [ratio * share for ratio in comparison.cpu_ratios("every label counts", "conversations")]
    result.figures.append(Figure("tokens per CPU second, conversations over plain rows", ratios, at_least=0.97))
    result.comparisons = [comparison]
    return result


def lengths(number: int, median: float, sigma: float, most: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, number)
    return np.clip(drawn, 8, most).astype(np.int64)


def _trainings(folder: Path, is_quick: bool) -> tuple[dict[str, Callable[[], Sample]], float]:
    """Returns the two arms, and the share of the conversations' rows that is filled."""
    task = Task(folder / "training", LARGE, steps=34, warm=4, batch_size=4, seq_len=256)
    if is_quick:
        task = Task(folder / "training", LARGE, steps=3, warm=1, batch_size=2, seq_len=32, log_every=2)
    prepare(task)
    corpus = _corpus(folder, lengths(4_000, task.seq_len / 8, 0.9, task.seq_len))
    whole = WholeRows(corpus, "train", task.seq_len)
    plain = PackedRows(corpus.tokens("train"), task.seq_len, EOS)
    return {
        "every label counts": partial(_train, task, plain.__getitems__, len(plain)),
        "conversations": partial(_train, task, whole.__getitems__, len(whole)),
    }, whole.packing.share


def _train(task: Task, read: Callable[[list[int]], dict[str, Any]], number: int) -> Sample:
    with patch.object(PackedRows, "__getitems__", lambda _, rows: read([row % number for row in rows])):
        return project.train(task)


def _corpus(folder: Path, sizes: np.ndarray) -> Corpus:
    """A cache of conversations of random bytes; the second half of each is the answer."""
    starts = np.concatenate(([0], np.cumsum(sizes + 1)))
    tokens = np.random.default_rng(1).integers(0, 256, starts[-1]).astype(np.uint16)
    tokens[starts[1:] - 1] = EOS
    counted = np.zeros(len(tokens), dtype=np.uint8)
    for start, end in zip(starts, starts[1:], strict=False):
        counted[(start + end) // 2 : end] = 1
    for kind, values in {"bin": tokens, "starts": starts, "counted": counted}.items():
        values.tofile(folder / f"train.{kind}")
    held = {"tokens": len(tokens), "documents": len(sizes), "starts_sha256": ""}
    return Corpus(folder, {"dtype": "uint16", "eos_token_id": EOS, "splits": {"train": held}})
