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
        names = (
            _copied(pattern)
            if "://" in pattern
            else glob.iglob(str(Path(pattern).expanduser()), recursive=True)
        )
        names = [*names]
        if lost := sorted(name for name in names if _is_broken_link(name)):
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches the link {lost[0]} to a file"
                " that does not exist: restore the file, or remove the link"
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
    is_table = path.suffix.lower() == ".parquet"
    number = 0
    try:
        records = _rows(path, fields) if is_table else _objects(path, json_values(path), fields)
        for number, record in enumerate(records, start=1):
            yield f"{path}:{number}", record
    except InputError:
        raise
    except Exception as error:  # each format and each decompressor has errors of its own
        raise unreadable(path, error, f" after record {number}") from error


def _objects(path: Path, records: Iterator[object], fields: Collection[str]) -> Iterator[Record]:
    """Yields records, which have to be objects. The only one of a file may be an object around
    the records, such as {"data": [...]}: it is refused with its key."""
    before = None
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise wrong(f"{path}:{number}", f"is no JSON object but {kind_of(record)}")
        if number == 1 and not record.keys() & {*fields}:
            before = record  # kept until it is known whether another follows
            continue
        if before is not None:
            yield before
            before = None
        yield record
    if before is not None:
        for key, value in before.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                raise wrong(
                    path,
                    f"is one object, whose {key!r} holds {len(value)} records: write them alone, as"
                    f" by `jq -c '.[\"{key}\"][]' {path.name}`",
                )
        yield before


def kind_of(value: object) -> str:
    """Returns what a value is, in words for a message."""
    names: dict[type, str] = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    names |= {list: "a list", dict: "an object", bytes: "bytes", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _rows(path: Path, fields: Collection[str]) -> Iterator[Record]:
    require("pyarrow", "data.source Parquet", extra="datasets")
    from pyarrow import parquet

    with path.open("rb") as file:
        check_pointer(path, file.read(100))
    table = parquet.ParquetFile(path)
    columns = [name for name in table.schema_arrow.names if name in fields]
    for batch in table.iter_batches(batch_size=TABLE_ROWS, columns=columns or None):
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
