"""Checks of what somebody else has named or written: names of files, files, trees of settings.

A run's folder, a checkpoint or a store may come from a stranger. Each name in it passes `inside`
before a file of that name is written, and each file is regular before it is read: a FIFO or
/dev/zero would never end. SECURITY.md lists what is trusted."""

import os
import stat
from pathlib import Path
from typing import Any

from .errors import InputError, shortened

__all__ = ["MOST_BYTES", "end_of", "inside", "name_fault", "refuse_links", "size_of", "text_of"]

MOST_BYTES = 64 * 2**20  # of a small file of a run, such as config.yaml or a manifest
MOST_OF_LOG = 8 * 2**20  # bytes of a log that are shown
MOST_VALUES = 1_000_000  # of a tree; a few lines of YAML with aliases can have 10^9
MOST_LEVELS = 100
MOST_NAME = 255  # bytes of a part of a path, in the file systems of Linux and macOS
OWN_LINKS = ("checkpoints",)  # a user may keep this folder on another disk


def name_fault(name: str) -> str | None:
    """Returns why `name` is not the name of a file in a folder, or None: it is relative, and no
    part is empty, `.` or `..`, too long, or has a NUL, a backslash or a line break."""
    if not name or name.startswith("/"):
        return "it is not relative"
    if any(ord(letter) < 32 or letter in "\\\x7f" for letter in name):
        return "it has a control character or a backslash"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"it has the part {part!r}"
        try:
            size = len(part.encode())
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can have
            return "it is not text"
        if size > MOST_NAME:
            return f"it has a part of more than {MOST_NAME} bytes"
    return None


def inside(folder: Path, name: str) -> Path:
    """Returns the path of the file `name` in `folder`. Raises InputError if it is not the name of a
    file in a folder, or leads out of `folder` by a link."""
    if why := name_fault(name):
        raise InputError(f"{shortened(repr(name), 200)} is not the name of a file in a run: {why}")
    path = folder / name
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"{shortened(name, 200)!r} leads out of {folder}: remove the link on its way"
        )
    return path


def size_of(path: Path) -> int:
    """Returns the size of a file in bytes. Raises OSError if it is not a regular file, or a link to
    one."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} is not a regular file")
    return found.st_size


def text_of(path: Path, errors: str = "strict") -> str:
    """Returns the content of a small text file. Raises OSError if it is not a regular file, or has
    more than MOST_BYTES."""
    if (size := size_of(path)) > MOST_BYTES:
        raise OSError(f"{path.name} has {size} bytes, and at most {MOST_BYTES} are read")
    return path.read_text(encoding="utf-8", errors=errors)


def end_of(path: Path) -> str:
    """Returns the text of a log, of a long one the last MOST_OF_LOG bytes, which may have been cut
    from 2**40 zeros."""
    with path.open("rb") as file:
        start = max(0, size_of(path) - MOST_OF_LOG)
        file.seek(start)
        text = file.read(MOST_OF_LOG).decode("utf-8", errors="replace")
    return f"(the last {MOST_OF_LOG} of {start + MOST_OF_LOG} bytes)\n{text}" if start else text


def check_tree(tree: Any) -> None:
    """Raises ValueError if a tree of mappings and lists contains itself, or is larger or deeper
    than any configuration: aliases of YAML make 10^9 values of ten lines. A value that occurs twice
    is counted twice, and visited once."""
    counts: dict[int, int] = {}  # values in a container, by its id; 0: it is being counted

    def count(value: Any, level: int) -> int:
        if not isinstance(value, dict | list):
            return 1
        if counts.get(id(value)) == 0:
            raise ValueError("it contains itself, by an alias inside of its own anchor")
        if level > MOST_LEVELS:
            raise ValueError(f"it has more than {MOST_LEVELS} levels")
        if id(value) not in counts:
            counts[id(value)] = 0
            below = value.values() if isinstance(value, dict) else value
            counts[id(value)] = 1 + sum(count(each, level + 1) for each in below)
        if counts[id(value)] > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES} values")
        return counts[id(value)]

    count(tree, 0)


def refuse_links(run: Path) -> None:
    """Raises InputError if a file or a folder in a run's folder is a link to somewhere else: what
    is written to it would change another file. The folder of checkpoints may be one."""
    root = run.resolve()
    entries = [run / name for name in os.listdir(run)] if run.is_dir() else []
    for name in ("crash", "evaluation", "launch"):  # in which verbs write
        if (run / name).is_dir() and not (run / name).is_symlink():
            entries += [run / name / below for below in os.listdir(run / name)]
    for path in sorted(entries):
        if path.is_symlink() and path.name not in OWN_LINKS:
            target = path.parent / os.readlink(path)
            if not Path(os.path.realpath(target)).is_relative_to(root):
                raise InputError(
                    f"{path} is a link to {os.readlink(path)}, outside of the run's folder: remove"
                    " it, or put a copy of the file in its place"
                )
