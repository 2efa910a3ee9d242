"""Reads records, which are dicts, from JSON files, Parquet tables and data sets of the hub.

Each reader yields pairs of a name, `file:number`, and a record. The sources (documents.py, chat.py)
make documents of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec

from ...errors import InputError, first_line, require

Record = tuple[str, Any]  # name and value; the value is a dict unless the file is wrong


def json_records(files: Iterable[Path]) -> Iterator[Record]:
    """Yields the records of files: one JSON object per line, or one JSON array; .gz, .zst too."""
    for path in files:
        number = 1
        try:
            with fsspec.open(str(path), "rb", compression="infer") as file:
                for number, line in enumerate(_json_lines(file), start=1):
                    if line.strip():
                        yield f"{path}:{number}", json.loads(line)
        except ValueError as error:
            kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
            raise InputError(
                f"{path} of data.source, line {number}, is not {kind}: {first_line(error)}"
            ) from error
        except Exception as error:  # each decompressor has errors of its own
            raise unreadable(path, error) from error


def parquet_records(files: Iterable[Path], fields: Collection[str]) -> Iterator[Record]:
    """Yields the rows of tables, with those columns of `fields` that they have.

    A table that has none of them gives one record, with all its columns' names and no values.
    """
    require("pyarrow", "data.source Parquet")
    from pyarrow import parquet

    for path in files:
        number = 0
        try:
            table = parquet.ParquetFile(path)
            names = table.schema_arrow.names
            columns = [name for name in names if name in fields]
            if not columns:
                yield str(path), dict.fromkeys(names)
                continue
            for batch in table.iter_batches(columns=columns):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", record
        except Exception as error:  # OSError, ArrowInvalid
            raise unreadable(path, error) from error


def hub_records(
    name: str, config: str | None, max_records: int | None, **options: Any
) -> Iterator[Record]:
    """Yields the records of a data set of the hub; `options` are those of `load_dataset`."""
    require("datasets", f"data.source, to read {name},")
    import datasets  # 1.5 s: only for this source

    try:
        records: Any = datasets.load_dataset(name, config, **options)
        for number, record in enumerate(islice(records, max_records), start=1):
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
