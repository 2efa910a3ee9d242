"""Finds files by glob patterns and reads records: JSON files, Parquet tables, hub data sets.

A reader yields pairs of a name, `file:number`, and a record. JSON (json_files.py) is read without
`datasets`: that package is an extra, and its reader gives all records of a file the same keys,
which would change the tokens of conversations."""

import errno
import glob
import os
import re
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec

from ...errors import InputError, first_line, require
from ...hub import check_reachable, why_not_loaded
from .files import check_pointer, wrong
from .json_files import json_values

TABLE_ROWS = 1024  # of a Parquet table that are Python objects at a time
Record = dict[str, Any]
Named = tuple[str, Record]  # name for messages, and the record


def matching(patterns: list[str]) -> list[Path]:
    """Returns the files that glob patterns match, sorted, each once; copies of those in a store.
    Raises InputError if a pattern matches no file."""
    found: dict[str, str] = {}  # by the file itself: links may give it several names
    for pattern in patterns:
        if "://" in pattern:
            names = _copied(pattern)
        else:
            names = glob.glob(str(Path(pattern).expanduser()), recursive=True)
        broken = sorted(name for name in names if _is_broken_link(name))
        if broken:
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches the link {broken[0]} to a file"
                " that does not exist: restore the file, or remove the link"
            )
        files = sorted(filter(os.path.isfile, names))
        if not files:
            hint = ""
            if Path(pattern).is_dir():
                hint = f"; a folder is written {pattern.rstrip('/')}/**/*"
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches no file, seen from {Path.cwd()}:"
                f" give files or glob patterns{hint}"
            )
        for name in files:
            found.setdefault(os.path.realpath(name), name)
    return [Path(name) for name in sorted(found.values())]


def _is_broken_link(name: str) -> bool:
    """Whether a link leads to nothing; one that leads in a circle has its files elsewhere."""
    try:
        os.stat(name)
    except OSError as error:
        return error.errno == errno.ENOENT and os.path.islink(name)
    return False


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
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    copies = {
        "cache_storage": str(Path(caches, "dist_template", "data", protocol)),
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
    number = 0
    try:
        if path.suffix.lower() == ".parquet":
            records = _rows(path, fields)
        else:
            records = _objects(path, json_values(path), fields)
        for number, record in enumerate(records, start=1):
            yield f"{path}:{number}", record
    except InputError:
        raise
    except Exception as error:  # each format and each decompressor has errors of its own
        raise unreadable(path, error, f" after record {number}") from error


def _objects(path: Path, records: Iterator[object], fields: Collection[str]) -> Iterator[Record]:
    """Yields records, which have to be objects. The only one of a file may be an object around
    the records, such as {"data": [...]}: it is refused with its key."""
    kept = None  # the first, until it is known whether another follows
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise wrong(f"{path}:{number}", f"is no JSON object but {kind_of(record)}")
        if number == 1 and record.keys().isdisjoint(fields):
            kept = record
            continue
        if kept is not None:
            yield kept
            kept = None
        yield record
    if kept is not None:
        for key, value in kept.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                raise wrong(
                    path,
                    f"is one object, whose {key!r} holds {len(value)} records: write them alone, as"
                    f" by `jq -c '.[\"{key}\"][]' {path.name}`",
                )
        yield kept


def kind_of(value: object) -> str:
    """Returns what a value is, in words for a message."""
    names: dict[type, str] = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        bytes: "bytes",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _rows(path: Path, fields: Collection[str]) -> Iterator[Record]:
    require("pyarrow", "data.source Parquet", extra="datasets")
    from pyarrow import parquet

    with path.open("rb") as file:
        check_pointer(path, file.read(100))
    table = parquet.ParquetFile(path)
    columns = [name for name in table.schema_arrow.names if name in fields]
    if not columns:
        columns = None  # all, so that the error for a record names them
    for batch in table.iter_batches(batch_size=TABLE_ROWS, columns=columns):
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
        reason = why_not_loaded(name, error, options=" --repo-type dataset")
        if "cannot be reached" in reason:
            raise wrong(name, f"cannot be read: {reason}") from error
        raise unreadable(name, error) from error


def unreadable(name: str | Path, error: BaseException, where: str = "") -> InputError:
    """Returns the error for a file or data set; `datasets` wraps the reason in its own errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return wrong(name, f"cannot be read{where}: {first_line(error)}")
