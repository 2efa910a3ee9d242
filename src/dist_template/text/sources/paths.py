"""Expands `data.source.paths` to unique files; links out of a pattern's folder need permission."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

from ...errors import InputError


def matching(patterns: list[str], follow_links: bool) -> list[Path]:
    """Returns the files that the patterns match, sorted, each file once.

    A file that links give several names has the one with the fewest folders.

    Args:
        patterns: Files or glob patterns, as of glob.glob with `recursive=True`.
        follow_links: Accept links out of the folder before a pattern's first wildcard.

    Raises:
        InputError: a pattern matches no file, or a link that is not accepted.
    """
    found: dict[tuple[int, int], str] = {}
    for pattern in patterns:
        files = [
            path
            for path in _checked(str(Path(pattern).expanduser()), follow_links)
            if os.path.isfile(path)
        ]
        if not files:
            hint = (
                f"; a folder is written {pattern.rstrip('/')}/**/*"
                if Path(pattern).is_dir()
                else ""
            )
            raise InputError(
                f"data.source.paths has {pattern!r}, which matches no file, seen from {Path.cwd()}:"
                f" give files or glob patterns{hint}"
            )
        for path in files:
            status = os.stat(path)
            other = found.setdefault((status.st_dev, status.st_ino), path)
            found[status.st_dev, status.st_ino] = min(
                path, other, key=lambda name: (name.count(os.sep), name)
            )
    if not found:
        raise InputError("data.source.paths is empty: give at least one file or glob pattern")
    return [Path(path) for path in sorted(found.values())]


def _checked(pattern: str, follow_links: bool) -> Iterator[str]:
    """Yields what `pattern` matches; refuses links out of the folder before its first wildcard."""
    if not glob.has_magic(pattern):
        yield pattern  # the user named this path: it may be a link to anywhere
        return
    fixed = Path(*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    root = os.path.join(os.path.realpath(fixed), "")

    @cache
    def check(path: str) -> None:
        target = os.path.realpath(path)
        if not follow_links and not os.path.join(target, "").startswith(root):
            raise InputError(
                f"data.source.paths has {pattern!r}, and a link leads from {path} to {target},"
                f" outside of {fixed}: remove the link, name its target in data.source.paths, or"
                " set data.source.follow_links to true"
            )

    for path in _expanded(pattern, check):
        check(os.path.dirname(path))
        if os.path.islink(path):
            check(path)
        yield path


def _expanded(pattern: str, check: Callable[[str], None]) -> Iterator[str]:
    """Yields what glob.iglob would, but each folder once: glob follows loops 40 levels deep."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    for top in glob.iglob(str(Path(*parts[:at]))) if at else ["."]:
        for folder in _folders(top, check):
            inside = os.path.join(glob.escape(folder), *(parts[at + 1 :] or "*"))
            yield from _expanded(inside, check)


def _folders(top: str, check: Callable[[str], None]) -> Iterator[str]:
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
            yield folder
            for path in (os.path.join(folder, name) for name in names):
                if os.path.islink(path):
                    check(path)
                    tops.append(path)
