"""Reading rows, tokenizing, packing; and what real data cost a training.

Reading: rows of the token cache as training reads them, beside one worker process, and beside a `datasets` table in
torch's format. Tokenizing: the standard library with its BPE, by one core and by the threads of `tokenizers`; and by
bytes. Training: a model of 5M parameters on the cache, beside the same batch over and over.

Targets: 50 M tokens/s read, two bytes each on disk; 0.7 M tokens/s and core tokenized, and more with more threads;
0.98 of all places filled, no token lost; training on data at 0.99 of the speed on made-up ones.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.data import DataLoader
from trainer_dev.data import DataModule

from dist_template.callbacks.global_order import GlobalOrder
from dist_template.text.batches.rows import NOT_COUNTED, PackedRows
from dist_template.text.cache.token_cache import Corpus
from dist_template.text.sources.documents import StandardLibrary, TextFiles
from dist_template.text.tokenizers import ByteBPE, Bytes, TokenizerSpec

from .arms import Clock, Comparison, Sample, compare, quiet
from .loops import project
from .loops.task import LARGE, Task, prepare
from .record import Figure, Options, Result

NAME = "data"
SEQ_LEN, MICRO_BATCH = 2048, 8
READ_TOKENS_PER_S, TOKENIZED_PER_S = 50e6, 0.7e6  # targets


def run(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(NAME)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = StandardLibrary()
        if options.quick:
            source = TextFiles([str(path) for path in source.files()[:40]])
        data = DataModule(
            source,
            ByteBPE(2048),
            SEQ_LEN,
            MICRO_BATCH,
            MICRO_BATCH,
            validation_share=0.0,
            test_share=0.0,
            cache_dir=str(folder),
        )
        with quiet():
            corpus = data.prepare()
        rounds = {"rounds": options.rounds, "warm": not options.quick}
        reading = compare(
            Comparison("Reading rows of 2,048", "token", "mapped"), _readers(data, options.quick), **rounds
        )
        texts = [text for _, text in source.documents()]
        tokenizing = Comparison("Tokenizing", "token", "one core")
        compare(tokenizing, _tokenizers(corpus, texts), **rounds)
        training = Comparison("5M model", "optimizer step", "made-up data")
        compare(training, _trainings(folder, options.quick), **rounds)
        result.comparisons = [reading, tokenizing, training]
        result.figures = [*_figures(reading, tokenizing, training), *_packing(data, corpus)]
    result.notes.append("The speed of tokenizing by threads needs idle cores: see the load above.")
    return result


def _figures(reading: Comparison, tokenizing: Comparison, training: Comparison) -> list[Figure]:
    read = [1 / sample.cpu_s / READ_TOKENS_PER_S for sample in reading.samples["mapped"]]
    core = [1 / sample.cpu_s / TOKENIZED_PER_S for sample in tokenizing.samples["one core"]]
    on_data = training.cpu_ratios("made-up data", "data")
    return [
        Figure("reading: tokens per CPU second, over 50 M", read, at_least=1),
        Figure("tokenizing with a BPE: tokens per CPU second, over 0.7 M", core, at_least=1),
        Figure("tokenizing by a thread per core: speed over one", tokenizing.speeds("threads"), at_least=1.3),
        Figure("training: speed on data over made-up ones, by CPU time", on_data, at_least=0.99),
    ]


def _packing(data: DataModule, corpus: Corpus) -> list[Figure]:
    tokens, rows = corpus.num_tokens("train"), data.rows_of("train")
    labels = [rows.__getitems__([row])["labels"] for row in range(len(rows))]
    counted = sum(int((label != NOT_COUNTED).sum()) for label in labels)
    on_disk = (corpus.folder / "train.bin").stat().st_size / tokens
    return [
        Figure("packing: share of places with a label that counts", [counted / (len(rows) * SEQ_LEN)], at_least=0.98),
        Figure(
            "packing: tokens that are in no row", [tokens - 1 - counted], at_most=0
        ),  # the first is predicted by none
        Figure("a token on disk", [on_disk], at_most=2, unit="bytes"),
    ]


# ---- reading ---------------------------------------------------------------------------------------------------------


def _readers(data: DataModule, is_quick: bool) -> dict[str, Callable[[], Sample]]:
    import datasets

    rows = data.rows_of("train")
    datasets.disable_progress_bars()
    whole = range(len(rows) - 1)
    table = datasets.Dataset.from_dict({"input_ids": [rows.tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN] for i in whole]})
    order = [*GlobalOrder(len(rows), MICRO_BATCH, MICRO_BATCH)]
    passes = 1 if is_quick else 2
    within = [[row for row in batch if row < len(table)] for batch in order]
    return {
        "mapped": lambda: _timed(rows, order, passes),
        "mapped, by one worker process": lambda: _timed(rows, order, passes, workers=1),
        "datasets": lambda: _timed(table.with_format("torch"), within, passes),
    }


def _timed(rows: Any, order: list[list[int]], passes: int, workers: int = 0) -> Sample:
    """Of reading `rows` in `order`, by `workers` processes whose CPU time counts."""
    loader = DataLoader(rows, batch_sampler=order * passes, collate_fn=_unchanged, num_workers=workers)
    used, clock = _of_children(), Clock()
    clock.start()
    tokens = sum(_count(batch) for batch in loader)
    sample = clock.stop(tokens)
    del loader
    return Sample(sample.cpu_s + (_of_children() - used) / tokens, sample.wall_s)


def _unchanged(batch: Any) -> Any:
    return batch


def _count(batch: Any) -> int:
    return batch["input_ids"].numel() if isinstance(batch, dict) else sum(one["input_ids"].numel() for one in batch)


# ---- tokenizing ------------------------------------------------------------------------------------------------------


def _tokenizers(corpus: Corpus, texts: list[str]) -> dict[str, Callable[[], Sample]]:
    plain = Bytes().fit(iter([]))
    return {
        "one core": partial(_encoded, ByteBPE(2048), corpus.tokenizer, texts, "false"),
        "threads": partial(_encoded, ByteBPE(2048), corpus.tokenizer, texts, "true"),
        "bytes, one core": partial(_encoded, Bytes(), plain, texts, "false"),
    }


def _encoded(spec: TokenizerSpec, tokenizer: Any, texts: list[str], threads: str) -> Sample:
    """`threads`: whether `tokenizers` may use its own, in its spelling."""
    clock = Clock()
    with patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": threads}):
        clock.start()
        tokens = sum(len(ids) for ids in spec.encode(tokenizer, texts))
        return clock.stop(tokens)


def _of_children() -> float:
    """CPU seconds of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---- training --------------------------------------------------------------------------------------------------------


def _trainings(folder: Path, is_quick: bool) -> dict[str, Callable[[], Sample]]:
    task = Task(folder / "training", LARGE, steps=34, warm=4, batch_size=4, seq_len=64)
    if is_quick:
        task = Task(folder / "training", LARGE, steps=3, warm=1, batch_size=2, seq_len=16, log_every=2)
    prepare(task)

    def made_up() -> Sample:
        batch = task.rows.__getitems__(list(range(task.batch_size)))
        batch["input_ids"] = torch.from_numpy(np.random.default_rng(0).integers(0, 256, batch["input_ids"].shape))
        with patch.object(PackedRows, "__getitems__", lambda self, rows: dict(batch)):
            return project.train(task)

    return {"made-up data": made_up, "data": partial(project.train, task)}
