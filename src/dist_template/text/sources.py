"""Sources of documents. A new source is one class in the project's `data.py`, and three lines of
YAML.

    data:
      source:
        class_path: Jsonl
        init_args: {paths: [corpus/*.jsonl]}

A source's attributes are its constructor's arguments. They name its cache: other arguments get
another cache.
"""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec

from ..errors import InputError, first_line, require
from .paths import matching


class Source(ABC):
    """Base class of a source: it yields the same documents in the same order each time."""

    @abstractmethod
    def documents(self) -> Iterator[tuple[str, str]]:
        """Yields pairs of a name, for messages, and a text."""

    def files(self) -> list[Path]:
        """Returns the local files that it reads: a change in one makes the cache stale."""
        return []

    def spec(self) -> dict[str, Any]:
        """Returns what identifies the corpus, in plain types."""
        spec = {"class": type(self).__name__, **vars(self)}
        if not spec.get("follow_links"):
            spec.pop(
                "follow_links", None
            )  # older caches, whose sources had no such key, stay valid
        return spec


class StandardLibrary(Source):
    """The running Python's standard library without tests: about 11 MB of text on any machine."""

    SKIPPED = frozenset(
        {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "__pycache__"}
    )

    def documents(self) -> Iterator[tuple[str, str]]:
        return _read(self.files())

    def files(self) -> list[Path]:
        found: list[Path] = []
        for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
            inside[:] = [
                name for name in inside if name not in self.SKIPPED
            ]  # installed packages are below it
            found += (Path(folder, name) for name in names if name.endswith(".py"))
        return sorted(found)

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "python": platform.python_version()}


class TextFiles(Source):
    """Plain text or source code in UTF-8.

    Args:
        paths: Files or glob patterns, `**` for any depth: `[corpus/**/*.txt]`.
        separator: What ends a document inside a file, such as "\\n\\n". null: each file is one
            document.
        follow_links: Read links that a pattern matches and that lead out of the pattern's folder.
            false: refuse them.
    """

    def __init__(
        self, paths: list[str], separator: str | None = None, follow_links: bool = False
    ) -> None:
        self.paths = paths
        self.separator = separator
        self.follow_links = follow_links

    def documents(self) -> Iterator[tuple[str, str]]:
        for name, text in _read(self.files()):
            for part in text.split(self.separator) if self.separator else [text]:
                yield name, part

    def files(self) -> list[Path]:
        return matching(self.paths, self.follow_links)


class Jsonl(Source):
    """One JSON object per line, or one JSON array of objects per file.

    Args:
        paths: Files or glob patterns; .gz and .zst are read too.
        field: The key that holds the text.
        follow_links: Read links that a pattern matches and that lead out of the pattern's folder.
            false: refuse them.
    """

    def __init__(self, paths: list[str], field: str = "text", follow_links: bool = False) -> None:
        self.paths = paths
        self.field = field
        self.follow_links = follow_links

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.files():
            number = 1
            try:
                with fsspec.open(str(path), "rb", compression="infer") as file:
                    for number, line in enumerate(_json_lines(file), start=1):
                        if line.strip():
                            yield _document(f"{path}:{number}", json.loads(line), self.field)
            except InputError:
                raise
            except ValueError as error:
                kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
                raise InputError(
                    f"{path} of data.source, line {number}, is not {kind}: {first_line(error)}"
                ) from error
            except Exception as error:  # each decompressor has errors of its own
                raise InputError(
                    f"{path} of data.source cannot be read: {first_line(error)}"
                ) from error

    def files(self) -> list[Path]:
        return matching(self.paths, self.follow_links)


class Parquet(Source):
    """Parquet tables.

    Args:
        paths: Files or glob patterns.
        field: The column that holds the text; the others are not read.
        follow_links: Read links that a pattern matches and that lead out of the pattern's folder.
            false: refuse them.
    """

    def __init__(self, paths: list[str], field: str = "text", follow_links: bool = False) -> None:
        self.paths = paths
        self.field = field
        self.follow_links = follow_links

    def documents(self) -> Iterator[tuple[str, str]]:
        require("pyarrow", "data.source Parquet")
        from pyarrow import parquet

        for path in self.files():
            number = 0
            try:
                table = parquet.ParquetFile(path)
                if self.field not in table.schema_arrow.names:
                    _document(str(path), dict.fromkeys(table.schema_arrow.names), self.field)
                for batch in table.iter_batches(columns=[self.field]):
                    for value in batch.column(0).to_pylist():
                        number += 1
                        yield _document(f"{path}:{number}", {self.field: value}, self.field)
            except InputError:
                raise
            except Exception as error:  # OSError, ArrowInvalid
                raise InputError(
                    f"{path} of data.source cannot be read: {first_line(error)}"
                ) from error

    def files(self) -> list[Path]:
        return matching(self.paths, self.follow_links)


class HubDataset(Source):
    """A data set of the Hugging Face hub, or a local folder in its format.

    Args:
        name: As in `datasets.load_dataset`, such as `org/name`, or a folder.
        config: The data set's configuration. null: its default.
        split: The split to read; train, validation and test splits are made from it.
        field: The column that holds the text.
        streaming: true reads over the network while tokenizing; false downloads the split first.
        revision: The commit or tag to read, so that the data cannot change underneath. null: the
            newest.
        max_documents: Stop after this number. null: read all.
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        field: str = "text",
        streaming: bool = True,
        revision: str | None = None,
        max_documents: int | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.split = split
        self.field = field
        self.streaming = streaming
        self.revision = revision
        self.max_documents = max_documents

    def documents(self) -> Iterator[tuple[str, str]]:
        require("datasets", f"data.source, to read {self.name},")
        import datasets  # 1.5 s: only for this source

        options: dict[str, Any] = {
            "split": self.split,
            "streaming": self.streaming,
            "revision": self.revision,
        }
        try:
            records: Any = datasets.load_dataset(self.name, self.config, **options)
            for number, record in enumerate(islice(records, self.max_documents), start=1):
                yield _document(f"{self.name}:{number}", record, self.field)
        except InputError:
            raise
        except Exception as error:  # `datasets` wraps the reason in errors of its own
            reason = error
            while reason.__cause__ is not None:
                reason = reason.__cause__
            raise InputError(
                f"{self.name} of data.source cannot be read: {first_line(reason)}"
            ) from error


def _json_lines(file: Any) -> Iterator[bytes]:
    """Yields one record per line, also of a file that is one JSON array or one indented object."""
    first = file.readline()
    if not (first.startswith(b"[") or first.strip() == b"{"):
        yield first
        yield from file
        return
    value = json.loads(first + file.read())
    for record in value if isinstance(value, list) else [value]:
        yield json.dumps(record).encode()


def _document(name: str, record: Any, field: str) -> tuple[str, str]:
    """Returns (name, text) of a record.

    Raises:
        InputError: the record has no text in `field`.
    """
    fields = record if isinstance(record, dict) else {}
    text = fields.get(field)
    if not isinstance(text, str):
        found = (
            "it is no text"
            if field in fields
            else f"there is only {', '.join(sorted(fields)) or 'no key'}"
        )
        raise InputError(f"data.source.field {field!r} names no text in {name}: {found}")
    return name, text


def _read(files: list[Path]) -> Iterator[tuple[str, str]]:
    for path in files:
        try:
            yield str(path), path.read_bytes().decode("utf-8", errors="replace")
        except OSError as error:
            raise InputError(f"{path} of data.source cannot be read: {error.strerror}") from error
