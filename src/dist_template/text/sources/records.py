"""Finds files by glob patterns and reads records: JSON files, Parquet tables, hub data sets.

A reader yields pairs of a name, `file:number`, and a record. JSON is read without `datasets`: that package is an extra,
and its reader gives all records of a file the same keys, which would change the tokens of conversations.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from ...errors import InputError, first_line, require

Record = tuple[str, object]  # name and value; the value is a dict unless the file is wrong


def matching(patterns: list[str], follow_links: bool) -> list[Path]:
    """Returns the files that glob patterns match, sorted; each by its name with the fewest folders.

    Raises:
        InputError: a pattern matches no file, or, without `follow_links`, a link that leads out of
            the folder before its first wildcard.
    """
    found: set[str] = set()
    for pattern in patterns:
        files = set(filter(os.path.isfile, _expanded(Path(pattern).expanduser(), follow_links)))
        if not files:
            is_folder = Path(pattern).is_dir()
            hint = f"; a folder is written {pattern.rstrip('/')}/**/*" if is_folder else ""
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches no file, seen from {Path.cwd()}:"
                f" give files or glob patterns{hint}"
            )
        found |= files
    names: dict[tuple[int, int], str] = {}
    for path in sorted(found, key=lambda path: (path.count(os.sep), path)):
        status = os.stat(path)
        names.setdefault((status.st_dev, status.st_ino), path)
    return [Path(path) for path in sorted(names.values())]


def _expanded(pattern: Path, follow_links: bool) -> Iterator[str]:
    """Yields what glob.iglob would, but each folder once: glob follows loops 40 levels deep."""
    num_fixed = len(pattern.parts)
    while glob.has_magic(str(Path(*pattern.parts[:num_fixed]))):
        num_fixed -= 1
    fixed, wildcards = Path(*pattern.parts[:num_fixed]), pattern.parts[num_fixed:]
    if not wildcards:
        yield str(pattern)  # the user named this path: it may be a link to anywhere
        return
    root = fixed.resolve()

    @cache
    def check(path: Path) -> None:
        target = path.resolve()
        if not follow_links and not target.is_relative_to(root):
            raise InputError(
                f"data.source.paths has {str(pattern)!r}, and a link leads from {path} to {target},"
                f" outside of {fixed}: remove the link, name its target in data.source.paths, or"
                " set data.source.follow_links to true"
            )

    paths: list[Path] = [fixed]
    for part in wildcards if wildcards[-1] != "**" else [*wildcards, "*"]:
        folders, paths = paths, []
        for folder in folders:
            if part == "**":
                paths += _folders(folder, check)
            else:
                paths += map(Path(folder).joinpath, glob.iglob(part, root_dir=folder))
    for path in paths:
        check(path.parent)
        if path.is_symlink():
            check(path)
        yield str(path)


def _folders(top: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Yields `top` and the folders below it, each once, links last, without hidden ones."""
    tops, entered = [top], set()
    while tops:
        for folder, names, _ in os.walk(tops.pop(0)):
            real = os.path.realpath(folder)
            names[:] = sorted(name for name in names if not name.startswith("."))
            if real in entered:
                names.clear()
                continue
            entered.add(real)
            yield Path(folder)
            for path in map(Path(folder).joinpath, names):
                if path.is_symlink():
                    check(path)
                    tops.append(path)


def json_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file: one JSON object per line, or one JSON array; .gz, .zst too."""
    number = 1
    try:
        with fsspec.open(str(path), "rb", compression="infer") as file:
            for number, line in enumerate(_json_lines(file), start=1):
                if line.strip():
                    yield f"{path}:{number}", json.loads(line)
    except ValueError as error:
        kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        raise InputError(f"{path} of data.source, line {number}, is not {kind}: {first_line(error)}") from error
    except Exception as error:  # each decompressor has errors of its own
        raise unreadable(path, error) from error


def _json_lines(file: BinaryIO) -> Iterable[bytes]:
    """Yields one record per line, also of a file that is one JSON array or one indented object."""
    first = file.readline()
    if not (first.startswith(b"[") or first.strip() == b"{"):
        yield first
        yield from file
        return
    value = json.loads(first + file.read())
    for record in value if isinstance(value, list) else [value]:
        yield json.dumps(record).encode()


def parquet_records(path: Path, fields: Collection[str]) -> Iterator[Record]:
    """Yields the rows of a table, with those columns of `fields` that it has, or with all."""
    require("pyarrow", "data.source Parquet")
    from pyarrow import parquet

    number = 0
    try:
        table = parquet.ParquetFile(path)
        columns = [name for name in table.schema_arrow.names if name in fields]
        for batch in table.iter_batches(columns=columns or None):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", record
    except Exception as error:  # OSError, ArrowInvalid
        raise unreadable(path, error) from error


def hub_records(name: str, config: str | None, **options: Any) -> Iterator[Record]:
    """Yields the records of a data set of the hub; `options` go to `load_dataset`."""
    require("datasets", f"data.source, to read {name},")
    import datasets  # 1.5 s: only for this source

    try:
        records = datasets.load_dataset(name, config, **options)
        for number, record in enumerate(records, start=1):
            yield f"{name}:{number}", record
    except Exception as error:
        raise unreadable(name, error) from error


def unreadable(name: str | Path, error: BaseException) -> InputError:
    """Returns the error for a file or data set; `datasets` wraps the reason in its own errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return wrong(name, f"cannot be read: {first_line(error)}")


def wrong(name: str | Path, what: str) -> InputError:
    """Returns the error for a record or file: what is wrong with it, and what to do."""
    return InputError(f"{name} of data.source {what}")
