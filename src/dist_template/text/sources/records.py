"""Finds files by glob patterns and reads records: JSON files, Parquet tables, hub data sets.

A reader yields pairs of a name, `file:number`, and a record. JSON is read without `datasets`: that package is an extra,
and its reader gives all records of a file the same keys, which would change the tokens of conversations.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from ...errors import InputError, first_line, require

Record = tuple[str, object]  # name and value; the value is a dict unless the file is wrong


def matching(patterns: list[str]) -> list[Path]:
    """Returns the files that glob patterns match, sorted, each once.

    Raises:
        InputError: a pattern matches no file.
    """
    found: dict[str, str] = {}  # by the file itself: links may give it several names
    for pattern in patterns:
        files = filter(os.path.isfile, glob.iglob(str(Path(pattern).expanduser()), recursive=True))
        names = {os.path.realpath(path): path for path in sorted(files, reverse=True)}
        if not names:
            is_folder = Path(pattern).is_dir()
            hint = f"; a folder is written {pattern.rstrip('/')}/**/*" if is_folder else ""
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches no file, seen from {Path.cwd()}:"
                f" give files or glob patterns{hint}"
            )
        found = names | found
    return [Path(path) for path in sorted(found.values())]


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
