"""Returns file:line of functions, modules, classes and stacks, for error messages."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from ...project import is_users


def of_function(function: Any) -> str:
    """Returns file:line of a function, method or wrapped function; "" for one in C."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code else ""


def of_module(module: Any) -> str:
    """Returns a module's class, and file:line of its `forward` unless that is torch's own."""
    location = of_function(module.forward)
    is_torch = type(module).__module__.startswith("torch.")
    return type(module).__name__ + ("" if is_torch else f", {location}")


def of_class(kind: type) -> str:
    """Returns a class and its file:line, if Python finds it."""
    try:
        file, line = inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1]
        return f"{kind.__name__}, {_short(file)}:{line}"
    except (OSError, TypeError):
        return kind.__name__


def of_stack(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns file:line of the last of `frames` that is in the user's code; "" if none is."""
    named = ((frame.f_code.co_filename, line) for frame, line in frames)
    own = [f"{_short(file)}:{line}" for file, line in named if is_users(file)]
    return own[-1] if own else ""


def of_caller(frame: FrameType | None = None) -> str:
    """Returns file:line of the innermost frame of the user's code at or above `frame`, or here."""
    return of_stack(reversed([*traceback.walk_stack(frame or inspect.currentframe())]))


def _short(file: str) -> str:
    """Returns the path below the working directory, or its last three parts if it is outside."""
    relative = os.path.relpath(file)
    return relative if not relative.startswith("..") else "/".join(Path(file).parts[-3:])
