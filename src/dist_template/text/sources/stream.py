"""TextStream: a train split that is read and tokenized while training, for corpora too large to prepare.

    datasets -> interleaved by weight -> one rank's documents -> tokens -> blocks of rows -> batches

Only the rows of a block are shuffled. The state after each batch is the state of the data sets at
the block's start and the number of batches since. A resumed run reads the block again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lightning as L
import numpy as np
from torch.utils.data import IterableDataset

from ...errors import InputError, require
from ..batches.rows import ROWS, PackedRows
from .documents import HubDataset
from .records import unreadable

State = dict[str, Any]  # of one rank, in plain types
STATE = "stream"  # key of a batch and of the checkpoint: the stream's state after it
DOCUMENTS = 8  # tokenized together
MOST_EMPTY = 10_000  # documents in a row that are empty or held out, before it is an error


@dataclass
class TextStream:
    """Data sets that are streamed, packed into rows. `data.source` remains for all else: a smaller corpus that gives
    the tokenizer and the validation and test splits, whose documents the stream skips.

    Args:
        datasets: Data sets of the hub, or folders in its format. Each starts again at its end.
        weights: Probability of each to give the next document. null: equal.
        shuffle_rows: Rows that a rank reads together and shuffles.
    """

    datasets: list[HubDataset]
    weights: list[float] | None = None
    shuffle_rows: int = 1024

    def __post_init__(self) -> None:
        datasets, weights = self.datasets, self.weights
        if not datasets or (weights and (len(weights) != len(datasets) or min(weights) <= 0)):
            raise InputError(
                f"data.stream has {len(datasets)} datasets and weights {weights}: give at least one"
                " data set, and each a weight above 0"
            )

    def documents(self, seed: int, rank: int, world_size: int) -> Any:
        """Returns one rank's share of the texts, an IterableDataset that has a state."""
        require("datasets", "data.stream")
        from datasets import interleave_datasets, load_dataset
        from datasets.distributed import split_dataset_by_node

        parts: list[Any] = []
        for each in self.datasets:
            given: dict[str, Any] = {"split": each.split, "revision": each.revision}
            try:
                part: Any = load_dataset(each.name, each.config, streaming=True, **given)
                if each.max_documents:
                    part = part.take(each.max_documents)
                part = part.select_columns([each.field])
                is_empty = next(iter(part), None) is None
            except Exception as error:
                raise unreadable(each.name, error) from error
            if is_empty:  # repeated, it would be read forever
                raise InputError(f"data.stream.datasets: {each.name} has no document: remove it")
            if each.field != "text":
                part = part.rename_column(each.field, "text")
            parts.append(part.repeat(None))
        texts = parts[0]
        if len(parts) > 1:
            weights = np.array(self.weights or [1.0] * len(parts))
            texts = interleave_datasets(parts, (weights / weights.sum()).tolist(), seed=seed)
        return split_dataset_by_node(texts, rank, world_size)

    def description(self) -> str:
        """Returns a description of the data sets and their files: names and sizes, or commits."""
        require("datasets", "data.stream")
        from datasets import load_dataset_builder

        known: list[object] = [self.weights]
        for each in self.datasets:
            try:
                config = load_dataset_builder(each.name, each.config, revision=each.revision).config
            except Exception as error:
                raise unreadable(each.name, error) from error
            name, files = each.name, [*map(str, (config.data_files or {}).get(each.split, ()))]
            if os.path.isdir(name):  # it may be moved
                files = [(os.path.relpath(file, name), os.stat(file).st_size) for file in files]
                name = ""
            known.append(vars(each) | {"name": name, "revision": None, "files": files})
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]
        return f"{len(self.datasets)} data set(s) with SHA-256 {digest}"


class StreamedRows(IterableDataset):
    """Yields one rank's batches of a stream, without end.

    Args:
        data: The PackedText whose sizes, tokenizer and splits apply.
        state: Returns the state after the last batch that was trained on; {} at the start. It is
            called when iteration starts, because the checkpoint is loaded after the loader is made.
    """

    def __init__(self, data: Any, state: Callable[[], State]) -> None:
        self.data = data
        self.state = state

    def __iter__(self) -> Iterator[dict[str, Any]]:
        data, micro = self.data, self.data.micro_batch_size
        num_rows = max(1, data.stream.shuffle_rows // micro) * micro
        num_tokens, sizes = num_rows * data.seq_len + 1, [micro, num_rows, data.seq_len]
        texts = data.stream.documents(data.seed, data.rank, data.world_size)
        start: State = self.state()
        if not start:
            start = {"texts": texts.state_dict(), "rest": [], "block": 0, "read": 0, "sizes": sizes}
        if start.get("sizes", sizes) != sizes:
            raise InputError(
                "a streamed run must resume with the same data.micro_batch_size,"
                " data.stream.shuffle_rows and data.seq_len: they were"
                f" {start['sizes']}, and are {sizes} now"
            )
        texts.load_state_dict(start["texts"])
        documents, first = iter(texts), start["read"] * micro
        while True:
            found = [np.array(start["rest"], dtype=np.int64)]
            num_empty = 0
            while sum(map(len, found)) < num_tokens:
                new = self._tokens(islice(documents, DOCUMENTS))
                num_empty = 0 if new else num_empty + DOCUMENTS
                if num_empty > MOST_EMPTY:
                    raise InputError(
                        f"data.stream: {num_empty:,} documents in a row are empty or held out: give"
                        " other data sets, or edit data.validation_share"
                    )
                found += new
            tokens, rest = np.split(np.concatenate(found), [num_tokens])
            rows = PackedRows(tokens, data.seq_len, data.eos_token_id, data.cross_document_attention)
            rng = np.random.default_rng((data.seed, data.rank, start["block"]))
            order = rng.permutation(num_rows).tolist()
            for at in range(first, num_rows, micro):
                state = {STATE: start | {"read": at // micro + 1}, ROWS: []}
                yield rows.__getitems__(order[at : at + micro]) | state
            # a block's last token is the next block's first
            start |= {"texts": texts.state_dict(), "rest": [tokens[-1].item(), *rest.tolist()]}
            start |= {"block": start["block"] + 1, "read": 0}
            first = 0

    def _tokens(self, records: Iterator[dict[str, Any]]) -> list[np.ndarray]:
        """Returns the tokens of the documents that are not held out, EOS after each."""
        data, texts = self.data, [record["text"] for record in records]
        if not all(isinstance(text, str) for text in texts):
            raise InputError("data.stream.datasets: a field has something that is no text")
        kept = [("", text) for text in texts if text.strip() and data.is_trained_on(text)]
        encoded = data.source.encode(data.tokenizer, data.text_tokenizer, kept)
        return [document.ids for document in encoded]


def own_state(states: list[State], trainer: L.Trainer) -> State:
    """Returns this rank's state of a checkpoint; refuses a checkpoint of more or fewer ranks."""
    if len(states) != trainer.world_size:
        raise InputError(
            f"the checkpoint has the stream's state of {len(states)} ranks, and there are"
            f" {trainer.world_size}: with data.stream a run resumes on as many ranks as before"
        )
    return states[trainer.global_rank]
