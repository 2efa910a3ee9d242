"""Finds files by glob patterns and reads records: JSON files, Parquet tables, hub data sets.

A reader yields pairs of a name, `file:number`, and a record. JSON is read without `datasets`: that
package is an extra, and its reader gives all records of a file the same keys, which would change
the tokens of conversations."""

import glob
import json
import os
import re
from collections.abc import Collection, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec

from ...errors import InputError, first_line, require
from ...hub import check_reachable, why_not_loaded

Record = dict[str, Any]
Named = tuple[str, Record]  # name for messages, and the record


def matching(patterns: list[str]) -> list[Path]:
    """Returns the files that glob patterns match, sorted, each once; copies of those in a store.
    Raises InputError if a pattern matches no file."""
    found: dict[str, str] = {}  # by the file itself: links may give it several names
    for pattern in patterns:
        names = (
            _copied(pattern)
            if "://" in pattern
            else glob.iglob(str(Path(pattern).expanduser()), recursive=True)
        )
        files = filter(os.path.isfile, names)
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


def _copied(pattern: str) -> list[str]:
    """Copies the files of an address (s3://bucket/*.jsonl, any of fsspec) that are not here, or
    have changed there, and returns their names here. Options of the store come from the
    environment."""
    if re.search(r"//[^/]*@", pattern):
        raise InputError(
            "data.source.paths has an address with a user, which would be recorded: use the"
            " environment"
        )
    protocol = pattern.partition("://")[0]
    cache = Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dist_template", "data"
    )
    copies = {
        "cache_storage": str(cache / protocol),
        "check_files": True,
        "cache_mapper": partial(quote, safe=""),
    }
    options = {"filecache": copies, protocol: {"use_listings_cache": False}}
    try:
        with fsspec.open_files(f"filecache::{pattern}", **options) as files:
            return [file.name for file in files]
    except Exception as error:  # each file system has errors of its own
        raise InputError(
            f"data.source.paths has {pattern!r}, which cannot be read: {first_line(error)}"
        ) from error


def records_of(path: Path, fields: Collection[str]) -> Iterator[Named]:
    """Yields the records of a file: .parquet, with those columns of `fields` that it has; else
    JSON."""
    records, number = _rows(path, fields) if path.suffix == ".parquet" else _json(path), 0
    try:
        for number, record in enumerate(records, start=1):
            if not isinstance(record, dict):
                raise wrong(f"{path}:{number}", "is no JSON object")
            yield f"{path}:{number}", record
    except InputError:
        raise
    except Exception as error:  # each format and each decompressor has errors of its own
        raise unreadable(path, error, f" after record {number}") from error


def _json(path: Path) -> Iterator[object]:
    """Yields one JSON object per line, or the elements of one JSON array; .gz, .zst too."""
    with fsspec.open(str(path), "rb", compression="infer") as file:
        first = file.readline()
        if first.lstrip().startswith(b"["):
            yield from json.loads(first + file.read())
            return
        for line in chain([first], file):
            if line.strip():
                yield json.loads(line)


def _rows(path: Path, fields: Collection[str]) -> Iterator[object]:
    require("pyarrow", "data.source Parquet", extra="datasets")
    from pyarrow import parquet

    table = parquet.ParquetFile(path)
    columns = [name for name in table.schema_arrow.names if name in fields]
    for batch in table.iter_batches(columns=columns or None):
        yield from batch.to_pylist()


def hub_records(name: str, config: str | None, split: str, revision: str | None) -> Iterator[Named]:
    """Yields the records of a data set of the hub, which are read over the network."""
    require("datasets", f"data.source, to read {name},")
    check_reachable(name)
    import datasets  # 1.5 s: only for this source, and after the check: it reads the mode once

    try:
        records = datasets.load_dataset(
            name, config, split=split, revision=revision, streaming=True
        )
        for number, record in enumerate(records, start=1):
            yield f"{name}:{number}", record
    except Exception as error:
        why = why_not_loaded(name, error, options=" --repo-type dataset")
        if "cannot be reached" in why:
            raise wrong(name, f"cannot be read: {why}") from error
        raise unreadable(name, error) from error


def unreadable(name: str | Path, error: BaseException, where: str = "") -> InputError:
    """Returns the error for a file or data set; `datasets` wraps the reason in its own errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return wrong(name, f"cannot be read{where}: {first_line(error)}")


def wrong(name: str | Path, what: str) -> InputError:
    """Returns the error for a record or file: what is wrong with it, and what to do."""
    return InputError(f"{name} of data.source {what}")
