"""Imports public names on first use: `--help` needs neither torch nor Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attribute_of(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of `module` (PEP 562); `places` has each public name's file."""

    def attribute(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(f".{places[name]}", __package__), name)

    return attribute
