"""Expands `data.source.paths`: files and glob patterns to files, each once."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from ..errors import InputError


def matching(patterns: list[str], follow_links: bool) -> list[Path]:
    """Returns the files that the patterns match, sorted; each file is returned once.

    A file that links give several names has the one with the fewest folders.

    Args:
        patterns: Files or glob patterns, as of glob.glob with `recursive=True`.
        follow_links: Accept links that lead out of the folder before a pattern's first wildcard.

    Raises:
        InputError: a pattern matches no file, or a link that is not accepted.
    """
    found: dict[tuple[int, int], str] = {}
    for pattern in patterns:
        files = [path for path in _expanded(str(Path(pattern).expanduser())) if os.path.isfile(path)]
        if not files:
            hint = f"; a folder is written {pattern.rstrip('/')}/**/*" if Path(pattern).is_dir() else ""
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches no file, seen from {Path.cwd()}: give"
                f" files or glob patterns{hint}"
            )
        if not follow_links:
            _refuse_outer_links(pattern, files)
        for path in files:
            status = os.stat(path)
            other = found.setdefault((status.st_dev, status.st_ino), path)
            found[status.st_dev, status.st_ino] = min(path, other, key=lambda name: (name.count(os.sep), name))
    if not found:
        raise InputError("data.source.paths is empty: give at least one file or glob pattern")
    return [Path(path) for path in sorted(found.values())]


def _refuse_outer_links(pattern: str, files: list[str]) -> None:
    if not glob.has_magic(pattern):
        return  # a named file may be a link to any place
    parts = Path(pattern).expanduser().parts
    folder = Path(*takewhile(lambda part: not glob.has_magic(part), parts))
    for path in files:
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(os.path.realpath(folder)):
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches {path}, and a link leads from there"
                f" to {target}, outside of {folder}: remove the link, name its target in"
                " data.source.paths, or set data.source.follow_links to true"
            )


def _expanded(pattern: str) -> Iterator[str]:
    """Yields what glob.iglob would, but enters each folder once: glob follows circular links 40 levels deep."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    for top in glob.iglob(str(Path(*parts[:at]))) if at else ["."]:
        for folder in _folders(top):
            yield from _expanded(os.path.join(glob.escape(folder), *(parts[at + 1 :] or "*")))


def _folders(top: str) -> Iterator[str]:
    """Yields `top` and the folders below it, each once, without hidden ones."""
    entered: set[str] = set()
    for folder, names, _ in os.walk(top, followlinks=True):
        names[:] = sorted(name for name in names if not name.startswith("."))
        if os.path.realpath(folder) in entered:
            names.clear()
            continue
        entered.add(os.path.realpath(folder))
        yield folder
