"""Reads a run's small files, writes them atomically, flattens what is in them, and hashes files."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from yaml import YAMLError

from . import foreign
from .errors import InputError, first_line

__all__ = ["flatten", "read_mapping", "read_text", "text_of", "write_atomically"]

GIB = 2**30  # bytes


def write_atomically(path: Path, text: str, keep_earlier: bool = False) -> None:
    """Writes a text file completely or not at all; its folder must exist. `keep_earlier` renames an
    existing file to `<name>.<n>.<ending>`, n counted from 0."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    if keep_earlier and path.exists():
        earlier = len(list(path.parent.glob(f"{path.stem}.*{path.suffix}")))
        path.rename(path.with_name(f"{path.stem}.{earlier}{path.suffix}"))
    os.replace(temporary, path)


def read_text(path: Path) -> str:
    """Returns the content of a file that a user writes. Raises OSError for what would be waited
    for, or fill the memory: a pipe, a device, a file of more than foreign.MOST_BYTES; ValueError
    for other bytes than UTF-8."""
    state = path.stat()
    if not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device: write it into a file", str(path))
    if state.st_size > foreign.MOST_BYTES:
        why = f"it has {state.st_size} bytes, and at most {foreign.MOST_BYTES} are read"
        raise OSError(errno.EFBIG, why, str(path))
    return path.read_text(encoding="utf-8")


def text_of(path: Path) -> str:
    """Returns the content of a file of the system; "" if it cannot be read."""
    try:
        return foreign.text_of(path, errors="replace")
    except OSError:
        return ""


def read_mapping(path: Path, cure: str, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """Returns the object in a JSON file, or in another that `parse` reads; {} if it is null. Raises
    InputError, which ends with `cure`, if there is no such file or it is damaged."""
    try:
        found = parse(foreign.text_of(path))
        foreign.check_tree(found)
    except (OSError, ValueError, RecursionError, YAMLError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}): {cure}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InputError(f"{path} is a {type(found).__name__}, and not an object: {cure}")
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"trainer.max_steps": 100} for {"trainer": {"max_steps": 100}}. Lists are values;
    empty mappings are dropped. The value of a class's key is its name, and arguments are below that
    key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and "class_path" in value:
            flat[path] = str(value["class_path"]).rsplit(".", 1)[-1]
            value = value.get("init_args") or {}
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
