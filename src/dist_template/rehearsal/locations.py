"""Returns where code is defined, as file:line, for sentences that lead a reader to it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from ..project import is_users


def of_function(function: Any) -> str:
    """The file:line of a function, method or wrapped function; "" for one in C."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code else ""


def of_module(module: Any) -> str:
    """A module's class, and the file:line of its `forward` unless that is torch's own."""
    location = of_function(module.forward)
    return type(module).__name__ + ("" if type(module).__module__.startswith("torch.") else f", {location}")


def of_class(kind: type) -> str:
    """A class and its file:line, where Python can find it."""
    try:
        return f"{kind.__name__}, {_short(inspect.getsourcefile(kind) or '')}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return kind.__name__


def of_stack(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The file:line of the innermost frame in the user's project; "" when there is none. `frames`: outermost first."""
    found = ""
    for frame, line in frames:
        if is_users(frame.f_code.co_filename):
            found = f"{_short(frame.f_code.co_filename)}:{line}"
    return found


def frames_of(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """The stack whose innermost frame is `frame`, outermost first."""
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def _short(file: str) -> str:
    """Relative to the working directory where it is below it, else the last three parts."""
    relative = os.path.relpath(file)
    return relative if not relative.startswith("..") else "/".join(Path(file).parts[-3:])
