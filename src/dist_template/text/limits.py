"""Checks the sizes and shares of a PackedText before anything is started."""

from __future__ import annotations

from typing import Any

from ..errors import InputError
from .batches.rows import packing_of
from .cache.token_cache import Corpus


def check_numbers(data: Any, world_size: int) -> None:
    """Refuses sizes and shares that no corpus can satisfy on `world_size` data-parallel ranks."""
    minima = {"seq_len": 1, "global_batch_size": 1, "micro_batch_size": 1, "num_workers": 0}
    for name, least in minima.items():
        value = getattr(data, name)
        if value < least:
            raise InputError(f"data.{name} is {value}: it must be {least} or more")
    for name in ("validation_share", "test_share"):
        value = getattr(data, name)
        if not 0 <= value < 1:
            raise InputError(f"data.{name} is {value}: it must be at least 0 and below 1")
    together = data.micro_batch_size * world_size
    kind = "pairs of answers" if data.source.pairs else "conversations"
    refused = {
        f"data.validation_share {data.validation_share} and data.test_share {data.test_share} leave"
        " nothing to train on: make their sum less than 1": (data.validation_share + data.test_share >= 1),
        "data.cross_document_attention lets a pair's second answer attend to its first: set it to"
        " false for data.source Preferences": data.source.pairs and data.cross_document_attention,
        f"global_batch_size {data.global_batch_size} is not a multiple of micro_batch_size"
        f" {data.micro_batch_size} x data_parallel {world_size} = {together}; edit"
        " data.global_batch_size or data.micro_batch_size": data.global_batch_size % together,
        "data.stream has no rows to choose from: remove data.repeat_first_batch": data.stream
        and data.repeat_first_batch,
        "data.stream is read in the training process: remove data.num_workers, which has no effect": data.stream
        and data.num_workers,
        f"data.stream has plain text alone: remove it to train on {kind}": (data.stream and data.source.whole),
    }
    for message, is_refused in refused.items():
        if is_refused:
            raise InputError(message)


def check_rows(data: Any, corpus: Corpus) -> Corpus:
    """Returns the corpus; refuses one in which a requested split has too few rows."""
    seq_len = data.seq_len
    wanted = {
        "train": (data.global_batch_size, "data.global_batch_size"),
        "validation": (int(data.validation_share > 0), "data.validation_share"),
        "test": (int(data.test_share > 0), "data.test_share"),
    }
    for split, (rows, key) in wanted.items():
        tokens, documents = corpus.num_tokens(split), corpus.manifest["splits"][split]["documents"]
        if corpus.is_whole(split):
            found = len(packing_of(corpus, split, seq_len).rows) - 1
            if found < rows:
                raise InputError(
                    f"the {split} split has {documents:,} conversations, which fill {found}"
                    f" sequences of data.seq_len {seq_len}, and {rows} are needed: give more"
                    f" conversations, or edit data.seq_len or {key}"
                )
        elif max(tokens - 1, 0) // seq_len < rows:
            raise InputError(
                f"the {split} split has {tokens:,} tokens in {documents:,} documents, and {rows}"
                f" sequences of data.seq_len {seq_len} need {rows * seq_len + 1:,}: give more text,"
                " or split it into more documents (TextFiles has `separator`), or edit data.seq_len"
                f" or {key}"
            )
    for name, counts in corpus.parts("train").items():
        if counts["tokens"] <= seq_len and not corpus.is_whole("train"):
            raise InputError(
                f"source {name!r} of data.source has {counts['tokens']:,} tokens to train on, fewer"
                f" than a sequence of data.seq_len {seq_len}: give more text, or remove it"
            )
    return corpus
