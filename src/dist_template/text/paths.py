"""Expands `data.source.paths`: files and glob patterns, each file once, links only where they are wanted."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

from ..errors import InputError


def matching(paths: list[str], follow_links: bool) -> list[Path]:
    """The files that the patterns match, each once, in one order on every machine.

    A file that links give several names has the one with the fewest folders.

    Args:
        paths: Files or glob patterns.
        follow_links: Accept links that lead out of the folder in front of a pattern's first wildcard.

    Raises:
        InputError: a pattern matches no file, or a link that is not accepted.
    """
    found: dict[tuple[int, int], str] = {}
    for pattern in paths:
        is_matched = False
        for match in _checked(str(Path(pattern).expanduser()), follow_links):
            try:
                held = os.stat(match)
            except (OSError, ValueError):  # a link to nothing; a NUL character
                continue
            if stat.S_ISREG(held.st_mode):
                is_matched = True
                other = found.get((held.st_dev, held.st_ino), match)
                found[held.st_dev, held.st_ino] = min(match, other, key=lambda name: (name.count(os.sep), name))
        if not is_matched:
            hint = f"; a folder is written {pattern.rstrip('/')}/**/*" if Path(pattern).is_dir() else ""
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches no file, seen from {Path.cwd()}: give"
                f" files or glob patterns{hint}"
            )
    if not found:
        raise InputError("data.source.paths is empty: give at least one file or glob pattern")
    return [Path(path) for path in sorted(found.values())]


def _checked(pattern: str, follow_links: bool) -> Iterator[str]:
    """What `pattern` matches; refuses links that lead out of the folder in front of its first wildcard."""
    if not glob.has_magic(pattern):
        yield pattern  # named, not found: it may be a link to anywhere
        return
    fixed = Path(*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    root = os.path.join(os.path.realpath(fixed), "")

    def check(path: str) -> None:
        target = os.path.realpath(path)
        if not follow_links and not os.path.join(target, "").startswith(root):
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches {path}, and a link leads from there to {target},"
                f" outside of {fixed}: remove the link, name its target in data.source.paths, or set"
                " data.source.follow_links to true"
            )

    folders: set[str] = set()
    for match in _expanded(pattern, check):
        if (folder := os.path.dirname(match)) not in folders:
            folders.add(folder)
            check(folder)
        if os.path.islink(match):
            check(match)
        yield match


def _expanded(pattern: str, check: Callable[[str], None]) -> Iterator[str]:
    """Like glob.iglob(pattern, recursive=True), but enters each folder once: links in a circle would have no end."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    for top in glob.iglob(str(Path(*parts[:at]))) if at else ["."]:
        for folder in _folders(top, check):
            yield from _expanded(os.path.join(glob.escape(folder), *(parts[at + 1 :] or "*")), check)


def _folders(top: str, check: Callable[[str], None]) -> Iterator[str]:
    """`top` and the folders below it, each once, links last; no hidden ones, as in glob."""
    tops, entered = [top], set()
    while tops:
        for folder, names, _ in os.walk(tops.pop(0)):
            real = os.path.realpath(folder)
            names[:] = [] if real in entered else sorted(name for name in names if not name.startswith("."))
            if real in entered:
                continue
            entered.add(real)
            yield folder
            for path in (os.path.join(folder, name) for name in names):
                if os.path.islink(path):
                    check(path)
                    tops.append(path)
