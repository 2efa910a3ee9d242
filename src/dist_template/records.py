"""Writes a run's small files atomically, flattens what is in them, and hashes files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GIB = 2**30  # bytes


def write_atomically(path: Path, text: str, keep_earlier: bool = False) -> None:
    """Writes a text file completely or not at all; its folder must exist.

    `keep_earlier` renames an existing file to `<name>.<n>.<ending>`, n counted from 0.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    if keep_earlier and path.exists():
        earlier = len(list(path.parent.glob(f"{path.stem}.*{path.suffix}")))
        path.rename(path.with_name(f"{path.stem}.{earlier}{path.suffix}"))
    os.replace(temporary, path)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"trainer.max_steps": 100} for {"trainer": {"max_steps": 100}}.

    Lists are values; empty mappings are dropped. The value of a class's key is the class's name,
    and its arguments are below that key, without `init_args`.
    """
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
