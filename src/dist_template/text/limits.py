"""Checks the sizes and shares of a data module before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..callbacks.equal_work import shared_out
from ..errors import InputError
from .batches.packing import packing_of

if TYPE_CHECKING:
    from .cache.token_cache import Corpus


def check_numbers(data: Any, world_size: int) -> None:
    """Refuses sizes and shares that no corpus can satisfy on `world_size` data-parallel ranks."""
    for name in ("seq_len", "global_batch_size", "micro_batch_size"):
        if getattr(data, name) < 1:
            raise InputError(f"data.{name} is {getattr(data, name)}: it must be 1 or more")
    if getattr(data, "num_workers", 0) < 0:
        raise InputError(f"data.num_workers is {data.num_workers}: it must be 0 or more")
    for name in ("validation_share", "test_share"):
        if not 0 <= getattr(data, name) < 1:
            raise InputError(
                f"data.{name} is {getattr(data, name)}: it must be at least 0 and below 1"
            )
    if data.validation_share + data.test_share >= 1:
        raise InputError(
            f"data.validation_share {data.validation_share} and data.test_share {data.test_share}"
            " leave nothing to train on: make their sum less than 1"
        )
    if data.source.pairs and data.cross_document_attention:
        raise InputError(
            "data.cross_document_attention lets a pair's second answer attend to its first: set it"
            " to false for data.source Preferences"
        )
    together = data.micro_batch_size * world_size
    if data.global_batch_size % together:
        raise InputError(
            f"global_batch_size {data.global_batch_size} is not a multiple of micro_batch_size"
            f" {data.micro_batch_size} x data_parallel {world_size} = {together}; edit"
            " data.global_batch_size or data.micro_batch_size"
        )
    if data.stream and (data.balance or data.rank_speeds or data.repeat_first_batch):
        raise InputError(
            "data.stream has no rows to choose from: remove data.balance, data.rank_speeds and"
            " data.repeat_first_batch"
        )
    if data.stream and data.num_workers:
        raise InputError(
            "data.stream is read in the training process: remove data.num_workers, which has no"
            " effect"
        )
    if data.stream and data.source.whole:
        kind = "pairs of answers" if data.source.pairs else "conversations"
        raise InputError(f"data.stream has plain text alone: remove it to train on {kind}")
    if data.rank_speeds:
        _check_speeds(data.rank_speeds, together, world_size)


def _check_speeds(speeds: list[float], together: int, world_size: int) -> None:
    if len(speeds) != world_size or min(speeds) <= 0:
        raise InputError(
            f"data.rank_speeds is {speeds}: give one number above 0 for each of the {world_size}"
            " data-parallel rank(s)"
        )
    if 0 in (counts := shared_out(together, speeds)):
        raise InputError(
            f"data.rank_speeds {speeds} leaves rank {counts.index(0)} without a row of the"
            f" {together} of a micro-batch over all ranks: edit it or data.micro_batch_size"
        )


def check_rows(data: Any, corpus: Corpus) -> Corpus:
    """Returns the corpus; refuses one in which a requested split has too few rows."""
    wanted = {
        "train": (data.global_batch_size, "data.global_batch_size"),
        "validation": (int(data.validation_share > 0), "data.validation_share"),
        "test": (int(data.test_share > 0), "data.test_share"),
    }
    for split, (rows, key) in wanted.items():
        if corpus.is_whole(split):
            _check_whole(corpus, split, data.seq_len, rows, key)
            continue
        tokens, documents = corpus.num_tokens(split), corpus.manifest["splits"][split]["documents"]
        if max(tokens - 1, 0) // data.seq_len < rows:
            raise InputError(
                f"the {split} split has {tokens:,} tokens in {documents:,} documents, and {rows}"
                f" sequences of data.seq_len {data.seq_len} need {rows * data.seq_len + 1:,}: give"
                f" more text, or split it into more documents (TextFiles has `separator`), or edit"
                f" data.seq_len or {key}"
            )
    for name, counts in corpus.parts("train").items():
        if counts["tokens"] <= data.seq_len and not corpus.is_whole("train"):
            raise InputError(
                f"source {name!r} of data.source has {counts['tokens']:,} tokens to train on, fewer"
                f" than a sequence of data.seq_len {data.seq_len}: give more text, or remove it"
            )
    return corpus


def _check_whole(corpus: Corpus, split: str, seq_len: int, rows: int, key: str) -> None:
    packing = packing_of(corpus, split, seq_len)
    found, documents = len(packing.rows) - 1, corpus.manifest["splits"][split]["documents"]
    if found < rows:
        raise InputError(
            f"the {split} split has {documents:,} conversations, which fill {found} sequences of"
            f" data.seq_len {seq_len}, and {rows} are needed: give more conversations, or edit"
            f" data.seq_len or {key}"
        )
