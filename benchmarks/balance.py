"""Work by load: the slowest rank's work over the mean, and a step of two ranks, one of them slow.

Rows of packed text have equally many tokens, and attention's work differs; conversations of one to
a row differ in tokens. Each is assigned to 8 and 64 ranks, 16 samples per rank and step: in order,
balanced within the global batch (callbacks/equal_work.py), and grouped by length (sorted over 50
global batches, as transformers' `group_by_length`), which changes what a step is made of. A step's
work on a rank is the sum over its samples, and the slowest rank sets its time.

Two processes train under DDP, by the command line. A token takes rank 0 one
millisecond, which it sleeps, and rank 1 two: with equal rows, with `data.rank_speeds
[1, 0.5]`, and `measured`.

Targets: balanced, the slowest rank has at most 1.05 of the mean; with a slow rank, a step takes at
most 0.75 of its time with equal rows.
"""

import os
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule

from dist_template.callbacks.equal_work import assign
from dist_template.callbacks.global_order import permutation
from dist_template.callbacks.rank_speeds import MEASURED_STEPS, SKIPPED_STEPS
from dist_template.text.batches.rows import ATTENTION_TOKENS
from dist_template.text.sources.documents import StandardLibrary, TextFiles
from dist_template.text.tokenizers import ByteBPE

from .arms import Comparison, Sample, quiet
from .loops import project
from .loops.task import SMALL, Task, prepare
from .ranks import on_ranks
from .record import Figure, Options, Result

NAME = "balance"
PER_RANK, ACCUMULATION = 16, 4  # samples of a rank and step, in so many micro-batches
SEQ_LEN, ROW = 8192, 4096  # tokens of a row: of files, of conversations
GROUPED = 50  # global batches that are sorted together
TOKEN_S = (1e-3, 2e-3)  # that a token takes rank 0 and rank 1
ARMS = {"equal rows": "null", "given": "[1.0, 0.5]", "measured": "measured"}


def run(options: Options) -> Result:
    result = Result(NAME)
    kinds = {"rows of Python files, attention alone": _of_files(options.quick)}
    number = 1024 * (10 if options.quick else 100)
    lengths = np.minimum(np.random.default_rng(0).lognormal(6.0, 0.8, number), ROW)
    kinds["conversations, tokens"] = lengths
    kinds["conversations, tokens and attention"] = lengths + lengths**2 / ATTENTION_TOKENS
    for name, costs in kinds.items():
        for ranks in (8, 64):
            result.figures += _figures(name, costs, ranks)
    comparison = Comparison("Two ranks, one half as fast, ddp", "optimizer step", "equal rows")
    comparison.samples = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        warm = SKIPPED_STEPS + MEASURED_STEPS + 2  # then the measured speeds hold
        steps = warm + (2 if options.quick else 20)
        task = Task(Path(folder), SMALL, steps=steps, warm=warm, batch_size=12, strategy="ddp")
        prepare(task)
        for round_number in range(1, options.rounds + 1):
            for name in random.sample(sorted(ARMS), len(ARMS)):
                (ranks_took,) = on_ranks(2, [partial(_train, task, ARMS[name])])
                cpu_s = sum(rank.cpu_s for rank in ranks_took)
                wall_s = max(rank.wall_s for rank in ranks_took)
                comparison.samples[name].append(Sample(cpu_s, wall_s))
            print(f"  {comparison.title}: round {round_number} of {options.rounds}", flush=True)
    result.comparisons.append(comparison)
    for name in ("given", "measured"):
        what = f"a rank half as fast: a step with data.rank_speeds {name} over one with equal rows"
        result.figures.append(Figure(what, comparison.wall_ratios(name), at_most=0.75))
    return result


def _figures(name: str, costs: np.ndarray, ranks: int) -> list[Figure]:
    size = ranks * PER_RANK
    order = permutation(len(costs), 0, 0)[: len(costs) // size * size].astype(np.int64)
    batches = costs[order].reshape(-1, size)
    starts = range(0, len(order), GROUPED * size)
    grouped = [np.sort(costs[order][at : at + GROUPED * size]) for at in starts]
    by_length = np.concatenate(grouped).reshape(-1, size)
    arms = {
        "in order": [batch.reshape(ranks, -1) for batch in batches],
        "balanced": [_balanced(batch, ranks) for batch in batches],
        "grouped by length": [batch.reshape(ranks, -1) for batch in by_length],
    }
    figures = []
    for arm, steps in arms.items():
        slowest = sum(step.sum(1).max() for step in steps)
        mean = sum(step.sum(1).mean() for step in steps)
        what = f"{name}, {ranks} ranks, {arm}: slowest over mean"
        most = 1.05 if arm == "balanced" else None
        figures.append(Figure(what, [float(slowest / mean)], at_most=most))
    return figures


def _balanced(batch: np.ndarray, ranks: int) -> np.ndarray:
    counts = [PER_RANK // ACCUMULATION] * ACCUMULATION
    assigned = assign(batch, [counts] * ranks, [1.0] * ranks)
    return batch[np.array(assigned).reshape(ranks, -1)]


def _of_files(is_quick: bool) -> np.ndarray:
    """Attention's work of each row of the standard library's files."""
    source: Any = StandardLibrary()
    seq_len = SEQ_LEN
    if is_quick:
        source, seq_len = TextFiles([str(path) for path in source.files()[:40]]), 64
    with tempfile.TemporaryDirectory() as folder, quiet():
        data = DataModule(
            source=source,
            tokenizer=ByteBPE(2048),
            seq_len=seq_len,
            global_batch_size=1,
            micro_batch_size=1,
            validation_share=0.0,
            test_share=0.0,
            cache_dir=folder,
        )
        data.prepare()
        rows = data.rows_of("train")
        costs = rows.work([*range(len(rows))]) - seq_len
    return np.tile(costs, 1 + 1024 // len(costs)) if len(costs) < 1024 else costs


def _train(task: Task, speeds: str) -> Sample:
    """Trains on this rank, which sleeps for each token."""
    step, token_s = LanguageModule.training_step, TOKEN_S[int(os.environ["RANK"])]

    def slowly(self: Any, batch: Any, batch_idx: int) -> Any:
        time.sleep(batch["input_ids"].numel() * token_s)
        return step(self, batch, batch_idx)

    with patch.object(LanguageModule, "training_step", slowly):
        flags = (*task.flags, f"--data.rank_speeds={speeds}")
        return project.train(Task(**{**vars(task), "flags": flags}))
