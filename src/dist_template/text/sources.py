"""Where documents come from. A new source is one class here or in `data.py`, and three lines of YAML.

    data:
      source:
        class_path: Jsonl
        init_args: {paths: [corpus/*.jsonl]}

A source's attributes are its constructor's arguments. They name its cache: other arguments get another cache.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError, first_line, require
from .paths import matching


class Source(ABC):
    """An iterable of documents that gives the same ones in the same order each time."""

    @abstractmethod
    def documents(self) -> Iterator[tuple[str, str]]:
        """Pairs of a name, for messages, and a text."""

    def files(self) -> list[Path]:
        """The local files that it reads: a change in one makes the cache stale."""
        return []

    def spec(self) -> dict[str, Any]:
        """What tells one corpus from another, in plain types; a key with a default that changes nothing is absent."""
        arguments = {key: value for key, value in vars(self).items() if key != "follow_links" or value}
        return {"class": type(self).__name__, **arguments}


class StandardLibrary(Source):
    """The running Python's standard library without its tests: about 11 MB of real text, always there."""

    SKIPPED = frozenset({"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "__pycache__"})

    def documents(self) -> Iterator[tuple[str, str]]:
        return _read(self.files())

    def files(self) -> list[Path]:
        found: list[Path] = []
        for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
            inside[:] = [name for name in inside if name not in self.SKIPPED]  # all that is installed is below it
            found += (Path(folder, name) for name in names if name.endswith(".py"))
        return sorted(found)

    def spec(self) -> dict[str, Any]:
        return {**super().spec(), "python": platform.python_version()}


class TextFiles(Source):
    """Plain text or source code in UTF-8.

    Args:
        paths: Files or glob patterns, `**` for any depth: `[corpus/**/*.txt]`.
        separator: What ends a document inside a file, such as "\\n\\n". null: each file is one document.
        follow_links: Read links that a pattern matches and that lead out of the pattern's folder. false: refuse them.
    """

    def __init__(self, paths: list[str], separator: str | None = None, follow_links: bool = False) -> None:
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
    """One JSON object per line.

    Args:
        paths: Files or glob patterns; .gz and .zst are read too.
        field: The key that holds the text.
        follow_links: Read links that a pattern matches and that lead out of the pattern's folder. false: refuse them.
    """

    def __init__(self, paths: list[str], field: str = "text", follow_links: bool = False) -> None:
        self.paths = paths
        self.field = field
        self.follow_links = follow_links

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.files():  # one by one, so that a message can name the file
            try:
                yield from _records(str(path), self.field, "json", data_files=str(path))
            except InputError as error:
                if error.__cause__ is None:
                    raise
                raise InputError(_wrong_line(path) or str(error)) from error

    def files(self) -> list[Path]:
        return matching(self.paths, self.follow_links)


class Parquet(Source):
    """Parquet tables.

    Args:
        paths: Files or glob patterns.
        field: The column that holds the text; the others are not read.
        follow_links: Read links that a pattern matches and that lead out of the pattern's folder. false: refuse them.
    """

    def __init__(self, paths: list[str], field: str = "text", follow_links: bool = False) -> None:
        self.paths = paths
        self.field = field
        self.follow_links = follow_links

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.files():
            yield from _records(str(path), self.field, "parquet", data_files=str(path))

    def files(self) -> list[Path]:
        return matching(self.paths, self.follow_links)


class HubDataset(Source):
    """A data set of the Hugging Face hub, or a local folder in its format.

    Args:
        name: As in `datasets.load_dataset`, such as `org/name`, or a folder.
        config: The data set's configuration. null: its default.
        split: Which split to read; our train/validation/test are cut from it.
        field: The column that holds the text.
        streaming: true reads over the network while tokenizing; false downloads the split first.
        revision: The commit or tag to read, so that the data cannot change underneath. null: the newest.
        max_documents: Stop after so many. null: read all.
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
        return _records(
            self.name,
            self.field,
            self.name,
            self.config,
            split=self.split,
            streaming=self.streaming,
            revision=self.revision,
            limit=self.max_documents,
        )


def _wrong_line(path: Path) -> str:
    """Says which line of a file is not JSON in UTF-8, "" where each one is or the file is damaged otherwise."""
    import fsspec

    number = 0
    try:
        with fsspec.open(str(path), "rb", compression="infer") as file:
            for line in file:
                number += 1
                if text := line.decode().strip():
                    json.loads(text)
    except ValueError as error:
        what = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        return f"{path} of data.source, line {number}, is not {what}: {first_line(error)}; mend or remove it"
    except Exception:  # of the decompressor, which has been reported already
        return ""
    return "" if number else f"{path} of data.source is empty: fill it, or take it out of data.source.paths"


def _read(files: list[Path]) -> Iterator[tuple[str, str]]:
    for path in files:
        try:
            yield str(path), path.read_bytes().decode("utf-8", errors="replace")
        except OSError as error:
            raise InputError(f"{path} of data.source cannot be read: {error.strerror}") from error


def _records(
    shown: str,
    field: str,
    *args: Any,
    split: str = "train",
    streaming: bool = True,
    limit: int | None = None,
    **kwargs: Any,
) -> Iterator[tuple[str, str]]:
    """The texts of what `datasets.load_dataset` gives; `shown` names it in messages."""
    require("datasets", f"data.source, to read {shown},")
    import datasets  # 1.5 s: only for those who need it

    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # the error below says it once

    try:
        records: Any = datasets.load_dataset(*args, split=split, streaming=streaming, **kwargs)
        for number, record in enumerate(records):
            if number == limit:
                return
            text = record.get(field)
            if not isinstance(text, str):
                held = "no text there" if field in record else f"only {', '.join(sorted(record))}"
                raise InputError(
                    f"data.source.field {field!r} names no text in {shown}: record {number + 1} has {held}"
                )
            yield f"{shown}:{number + 1}", text
    except InputError:
        raise
    except Exception as error:  # `datasets` wraps what happened in errors of its own
        reason = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise InputError(f"{shown} of data.source cannot be read: {first_line(reason)}") from error
