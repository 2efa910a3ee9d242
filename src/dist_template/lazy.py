"""Imports public names on first use: `--help` needs neither torch nor Lightning."""

import gc
import importlib
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from .errors import require

OF_EXTRAS = {"transformers": "text", "tokenizers": "text", "safetensors": "text"}  # by package


def attribute_of(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of `module` (PEP 562); `places` has each public name's file. It
    raises InputError for a name that needs an extra which is not installed."""

    def attribute(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f".{places[name]}", __package__), name)
        except ModuleNotFoundError as error:
            if error.name in OF_EXTRAS:
                require(error.name, f"{module}.{name}", extra=OF_EXTRAS[error.name])
            raise
        # Python finds it there from now on; jsonargparse asks for each class dozens of times.
        setattr(sys.modules[module], name, value)
        return value

    return attribute


@contextmanager
def without_collections() -> Generator[None]:
    """For imports, which create a million objects that stay: no garbage collection looks at them.
    It freezes them, so that later collections pass over them. A start takes a fifth less CPU
    time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
