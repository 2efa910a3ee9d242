"""Sources of documents. A new source is one class in the project's `data.py`, and three lines of
YAML.

    data:
      source:
        class_path: Jsonl
        init_args: {paths: [corpus/*.jsonl]}

A source's attributes are its constructor's arguments. They name its cache: other arguments get
another cache."""

from __future__ import annotations

import os
import platform
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import InputError
from ...project import Choice
from ..tokenizers import added_tokens, encode_prompt
from .files import check_encoding, text_blocks, wrong
from .records import Named, hub_records, kind_of, matching, records_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as Tokenizer

    from ..tokenizers import TokenizerSpec
Documents = list[tuple[str, str]]  # names and texts
BATCH_CHARACTERS = 2**20  # encoded together: a fraction of a second, some ten MB of memory


class Encoded(NamedTuple):
    """The tokens of one document."""

    ids: np.ndarray  # (tokens,)
    counted: np.ndarray | None = None  # (tokens,): is a label that counts. None: all are


class Source(Choice, ABC):
    """Base class of a source: it yields the same documents in the same order each time.

    `whole`: documents are stored unsplit, with start offsets and loss masks, and a row holds
    documents that fit into it together (rows.py). `pairs`: each document is two sequences, which do
    not attend to each other (Preferences). `ratings`: the second is another's answer (Ratings)."""

    whole = False
    pairs = False
    ratings = False

    @abstractmethod
    def documents(self) -> Iterator[tuple[str, str]]:
        """Yields pairs of a name, for messages, and a text."""

    def parts(self) -> dict[str, Source]:
        """Returns the sources of a mixture by name; any other source is its only part, ""."""
        return {"": self}

    def files(self) -> list[Path]:
        """Returns the local files that it reads: a change in one makes the cache stale."""
        return []

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer that encodes and is saved with the tokens."""
        return tokenizer

    def encode(
        self, spec: TokenizerSpec, tokenizer: Tokenizer, documents: Documents
    ) -> list[Encoded]:
        """Returns the tokens of each document: what `tokenizer(text)` starts with, such as BOS, the
        text's, and EOS."""
        texts = [text for _, text in documents]
        start = np.array(added_tokens(tokenizer)[0], dtype=np.int64)
        end = [tokenizer.eos_token_id]
        encoded = []
        for ids in spec.encode(tokenizer, texts):
            encoded.append(Encoded(np.concatenate([start, ids, end])))
        return encoded

    def encode_prompt(self, tokenizer: Tokenizer, prompt: str) -> list[int]:
        """Returns the tokens that `predict` and the samples of `data.prompts` continue."""
        return encode_prompt(tokenizer, prompt)

    def notes(self) -> dict[str, Any] | None:
        """Returns what `prepare` reports about the documents that were read last, as in notes.py;
        None: nothing."""
        return None

    def spec(self) -> dict[str, object]:
        """Returns what identifies the corpus, in plain types."""
        return {"class": type(self).__name__, **vars(self)}


class StandardLibrary(Source):
    """The running Python's standard library without tests: about 11 MB of text on any machine."""

    # installed packages are below it
    SKIPPED = ("test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "__pycache__")

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.files():
            yield str(path), "".join(text_blocks(path))

    def files(self) -> list[Path]:
        found: list[Path] = []
        for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
            # os.walk descends into what stays in this list
            inside[:] = [name for name in inside if name not in self.SKIPPED]
            for name in names:
                if name.endswith(".py"):
                    found.append(Path(folder, name))
        return sorted(found)

    def spec(self) -> dict[str, object]:
        return super().spec() | {"python": platform.python_version()}


@dataclass
class FileSource(Source):
    """Base class of sources that read files.

    Args:
        paths: Files or glob patterns, `**` for any depth: `[corpus/**/*.txt,
            s3://bucket/corpus/*.txt]`. Files in a store, at any address of fsspec, are copied to
            `~/.cache/dist_template/data`."""

    paths: list[str]

    def files(self) -> list[Path]:
        return matching(self.paths)


@dataclass
class TextFiles(FileSource):
    """Plain text or source code, also .gz, .bz2, .xz and .zst. Bytes that are no text in the
    encoding are refused.

    Args:
        separator: What ends a document inside a file, such as "\\n\\n". null: each file is one
            document.
        encoding: The encoding of all files, by Python's name, such as latin-1. null: UTF-8, or what
            a file's byte-order mark says."""

    separator: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        check_encoding(self.encoding)

    def documents(self) -> Iterator[tuple[str, str]]:
        files = self.files()
        if not self.separator:
            for path in files:
                yield str(path), "".join(text_blocks(path, self.encoding))
            return
        num_parts = 0
        for path in files:
            for part in self._parts(path, self.separator):
                num_parts += 1
                yield str(path), part
        if num_parts == len(files):  # one of each
            hint = "edit it, or set it to null for a document per file"
            if "\\" in self.separator:
                hint = f'it has a backslash; in YAML, write it in double quotes, "{self.separator}"'
            raise InputError(
                f"data.source.separator {self.separator!r} is in none of the {len(files)} files of"
                f" data.source.paths: {hint}"
            )

    def _parts(self, path: Path, separator: str) -> Iterator[str]:
        """Yields the documents of a file, of which one block is in memory at a time. Raises
        InputError if its lines end with CRLF, and so the separator is not in it."""
        rest, has_ended = "", False
        crlf = separator  # as it is in a file whose lines end with CRLF
        if "\r" not in separator:
            crlf = separator.replace("\n", "\r\n")
        for block in text_blocks(path, self.encoding):
            start = max(0, len(rest) - len(crlf))  # what is before has been searched
            rest += block
            added = rest[start:]
            if separator in added:
                has_ended = True
                *parts, rest = rest.split(separator)
                yield from parts
            elif not has_ended and crlf in added:
                raise wrong(
                    path,
                    f"has lines that end with CRLF, so data.source.separator {separator!r} is not"
                    f" in it: give {crlf!r}, or convert the file",
                )
        yield rest

    def spec(self) -> dict[str, object]:
        spec = super().spec()
        if self.encoding is None:  # caches from before there was the key have none
            del spec["encoding"]
        return spec


@dataclass
class Jsonl(FileSource):
    """One JSON object per line, or one JSON array of objects per file; also .gz, .bz2, .xz and
    .zst.

    Args:
        field: The key that holds the text."""

    field: str = "text"

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.files():
            yield from _documents(records_of(path, [self.field]), self.field)


@dataclass
class Parquet(Jsonl):
    """Parquet tables, of which one column is read.

    Args:
        field: The column that holds the text."""


@dataclass
class HubDataset(Source):
    """A data set of the Hugging Face hub, or a local folder in its format.

    Args:
        name: As in `datasets.load_dataset`, such as `org/name`, or a folder.
        config: The data set's configuration. null: its default.
        split: The split to read; train, validation and test splits are made from it.
        field: The column that holds the text.
        revision: The commit or tag to read, so that the data cannot change underneath. null: the
            newest."""

    name: str
    config: str | None = None
    split: str = "train"
    field: str = "text"
    revision: str | None = None

    def documents(self) -> Iterator[tuple[str, str]]:
        return _documents(
            hub_records(self.name, self.config, self.split, self.revision), self.field
        )


def _documents(records: Iterable[Named], field: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each record; refuses one that has no text in `field`."""
    for name, record in records:
        text = record.get(field)
        if not isinstance(text, str):
            keys = ", ".join(sorted(record)) or "no key"
            if field in record:
                keys += f"; {field} is {kind_of(text)}"
            raise InputError(
                f"data.source.field {field!r} names no text in {name}, which has {keys}"
            )
        yield name, text


def texts_of(source: Source, done: Counter[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yields documents without empty ones. UTF-8 cannot encode half of a surrogate pair, which
    JSON can write: it becomes "?". `done` counts both."""
    if done is None:
        done = Counter()
    is_empty = True
    for name, text in source.documents():
        if not text.strip():
            done["empty"] += 1
            continue
        is_empty = False
        try:
            text.encode()
        except UnicodeEncodeError:
            done["halves"] += 1
            text = text.encode(errors="replace").decode()
        yield name, text
    if is_empty:
        raise InputError(
            f"data.source {type(source).__name__} has no text in it: point it at other files"
        )


def batches_of(source: Source, done: Counter[str] | None = None) -> Iterator[Documents]:
    """Yields the same documents, as many at a time as are encoded together."""
    batch, characters = [], 0
    for name, text in texts_of(source, done):
        batch.append((name, text))
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
