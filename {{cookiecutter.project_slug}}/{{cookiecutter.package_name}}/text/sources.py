"""Where documents come from. A new source is one class here or in `data.py`, and three lines of YAML.

    data:
      source:
        class_path: Jsonl
        init_args: {paths: [corpus/*.jsonl]}

A source's attributes are its constructor's arguments. They name its cache: other arguments get another cache.
"""

from __future__ import annotations

import glob
import os
import platform
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError, first_line


class Source(ABC):
    """An iterable of documents that gives the same ones in the same order each time."""

    @abstractmethod
    def documents(self) -> Iterator[tuple[str, str]]:
        """Pairs of a name, for messages, and a text."""

    def files(self) -> list[Path]:
        """The local files that it reads: a change in one makes the cache stale."""
        return []

    def spec(self) -> dict[str, Any]:
        """What tells one corpus from another, in plain types."""
        return {"class": type(self).__name__, **vars(self)}


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
    """

    def __init__(self, paths: list[str], separator: str | None = None) -> None:
        self.paths = paths
        self.separator = separator

    def documents(self) -> Iterator[tuple[str, str]]:
        for name, text in _read(self.files()):
            for part in text.split(self.separator) if self.separator else [text]:
                yield name, part

    def files(self) -> list[Path]:
        return _matching(self.paths)


class Jsonl(Source):
    """One JSON object per line.

    Args:
        paths: Files or glob patterns; .gz and .zst are read too.
        field: The key that holds the text.
    """

    def __init__(self, paths: list[str], field: str = "text") -> None:
        self.paths = paths
        self.field = field

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.files():  # one by one, so that a message can name the file
            yield from _records(str(path), self.field, "json", data_files=str(path))

    def files(self) -> list[Path]:
        return _matching(self.paths)


class Parquet(Source):
    """Parquet tables.

    Args:
        paths: Files or glob patterns.
        field: The column that holds the text; the others are not read.
    """

    def __init__(self, paths: list[str], field: str = "text") -> None:
        self.paths = paths
        self.field = field

    def documents(self) -> Iterator[tuple[str, str]]:
        for path in self.files():
            yield from _records(str(path), self.field, "parquet", data_files=str(path))

    def files(self) -> list[Path]:
        return _matching(self.paths)


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


def _matching(paths: list[str]) -> list[Path]:
    """The files that the patterns match, each once, in one order on every machine."""
    found: set[str] = set()
    for pattern in paths:
        matches = [p for p in glob.glob(str(Path(pattern).expanduser()), recursive=True) if Path(p).is_file()]
        if not matches:
            hint = f"; a folder is written {pattern.rstrip('/')}/**/*" if Path(pattern).is_dir() else ""
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches no file, seen from {Path.cwd()}: give"
                f" files or glob patterns{hint}"
            )
        found.update(matches)
    if not found:
        raise InputError("data.source.paths is empty: give at least one file or glob pattern")
    return [Path(p) for p in sorted(found)]


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
    import datasets  # 1.5 s: only for those who need it

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
