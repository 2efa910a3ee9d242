"""Checks the sizes and shares of a PackedText before anything is started; the type of each argument
has its least value.

`check_numbers` needs the configuration alone. `check_rows` comes later, when there is a corpus."""

from typing import Any

from ..by_tokens import check_phases, values_of
from ..errors import InputError
from .batches.rows import packing_of
from .cache.token_cache import Corpus


def check_numbers(data: Any, world_size: int) -> None:
    """Refuses sizes and shares that no corpus can satisfy on `world_size` data-parallel ranks."""
    if data.validation_share + data.test_share >= 1:
        raise InputError(
            f"data.validation_share {data.validation_share} and data.test_share {data.test_share}"
            " leave nothing to train on: make their sum less than 1"
        )
    if data.source.pairs and data.cross_document_attention:
        raise InputError(
            "data.cross_document_attention lets a pair's second answer attend to its first: set"
            " it to false for data.source Preferences"
        )
    key, given = "data.global_batch_size", data.rows_per_step
    together = data.micro_batch_size * world_size
    check_phases(key, given)
    if any(value < 1 or value % 1 for value in values_of(given)):
        raise InputError(f"{key} has sizes {values_of(given)}: give 1 or more, without a fraction")
    limit = getattr(data.trainer, "limit_train_batches", 1.0)
    if isinstance(given, list) and data.trainer is not None:
        endless = f"{key} has phases, so the stream of samples has no epochs"
        if data.trainer.max_steps < 0:
            raise InputError(f"{endless}: set trainer.max_steps")
        if (limit != 1.0 or isinstance(limit, int)) and not data.trainer.fast_dev_run:
            raise InputError(
                f"{endless}: remove trainer.limit_train_batches {limit}, and set trainer.max_steps"
            )
    divisor, _ = data.batch_sizes
    if divisor % together:
        phases = " (which divides its phases)" if isinstance(given, list) else ""
        raise InputError(
            f"{key} {divisor}{phases} is not a multiple of data.micro_batch_size"
            f" {data.micro_batch_size} x data_parallel {world_size} = {together}; edit one of them"
        )
    _check_balance(data, world_size)
    accumulation = divisor // together
    if isinstance(limit, int) and limit % accumulation and not data.trainer.fast_dev_run:
        raise InputError(
            f"trainer.limit_train_batches {limit} ends an epoch within an optimizer step: give a"
            f" multiple of {accumulation}, the micro-batches of a step"
        )


def _check_balance(data: Any, world_size: int) -> None:
    """Refuses data.balance and data.rank_speeds where they change nothing, or cannot be."""
    if data.balance and data.cross_document_attention:
        raise InputError(
            "data.balance has no effect with data.cross_document_attention true, where all rows"
            " have equal work: set one of them to false"
        )
    speeds = data.rank_speeds
    if speeds is None:
        return
    key = f"data.rank_speeds {speeds}"
    if world_size == 1:
        raise InputError(f"{key} has no effect on one data-parallel rank: remove it")
    if isinstance(speeds, str):
        if data.micro_batch_size == 1:
            raise InputError(
                f"{key} has no effect with data.micro_batch_size 1, because each rank needs a row"
                " in each micro-batch: raise data.micro_batch_size, or remove it"
            )
        return
    if len(speeds) != world_size or min(speeds) <= 0:
        raise InputError(
            f"{key}: give one number above 0 for each of the {world_size} data-parallel ranks, or"
            " measured"
        )
    rows = data.batch_sizes[0]
    accumulation = rows // (data.micro_batch_size * world_size)
    if rows * min(speeds) / sum(speeds) < accumulation:
        raise InputError(
            f"{key} leaves rank {speeds.index(min(speeds))} without a row in some of the"
            f" {accumulation} micro-batches of a step of {rows} rows: raise data.micro_batch_size,"
            " or edit the speeds"
        )


def check_rows(data: Any, corpus: Corpus) -> Corpus:
    """Returns the corpus; refuses one in which a requested split has too few rows."""
    wanted = {
        "train": (data.batch_sizes[1], "data.global_batch_size"),
        "validation": (int(data.validation_share > 0), "data.validation_share"),
        "test": (int(data.test_share > 0), "data.test_share"),
    }
    for split, (rows, key) in wanted.items():
        counts = corpus.manifest["splits"][split]
        filled = max(counts["tokens"] - 1, 0) // data.seq_len
        if corpus.is_whole(split):
            filled = len(packing_of(corpus, split, data.seq_len, data.reads_ends).rows) - 1
        least = data.micro_batch_size * data.world_size
        if split == "train" and filled < least:  # no global batch size can be smaller
            key = f"data.micro_batch_size {data.micro_batch_size} with {key}"
        if filled < rows:
            raise InputError(
                f"the {split} split has {counts['tokens']:,} tokens in {counts['documents']:,}"
                f" documents, which fill {filled} sequences of data.seq_len {data.seq_len}, and"
                f" {rows} are needed: give more documents, or edit data.seq_len or {key}"
            )
    is_whole = corpus.is_whole("train")
    if is_whole:
        packing = packing_of(corpus, "train", data.seq_len, data.reads_ends)
        for name, num_rows in packing.sizes.items():
            if num_rows:
                continue
            given = corpus.parts("train")[name]["documents"]
            raise InputError(
                f"source {name!r} of data.source has no row to train on: the train split has"
                f" {given} documents of it; give more, raise data.seq_len, or remove the source"
            )
    for name, counts in corpus.parts("train").items():
        if counts["tokens"] <= data.seq_len and not is_whole:
            raise InputError(
                f"source {name!r} of data.source has {counts['tokens']:,} tokens to train on, fewer"
                f" than a sequence of data.seq_len {data.seq_len}: give more text, or remove it"
            )
    return corpus
