"""Returns file:line of functions, modules, classes and stacks, for error messages."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from torch import nn

from ...project import is_users


def of_function(function: Callable | None) -> str:
    """Returns file:line of a function, method or wrapped function; "" for None or one in C."""
    if function is None:
        return ""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code else ""


def of_module(module: nn.Module) -> str:
    """Returns a module's class, and file:line of its `forward` unless the class is torch's."""
    kind = type(module)
    if kind.__module__.startswith("torch."):
        return kind.__name__
    return f"{kind.__name__}, {of_function(module.forward)}"


def of_class(kind: type) -> str:
    """Returns a class and its file:line, if Python finds it."""
    try:
        file, line = inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1]
        return f"{kind.__name__}, {_short(file)}:{line}"
    except (OSError, TypeError):
        return kind.__name__


def of_stack(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns file:line of the last of `frames` that is in the user's code; "" without one."""
    found = ""
    for frame, line in frames:
        if is_users(frame.f_code.co_filename):
            found = f"{_short(frame.f_code.co_filename)}:{line}"
    return found


def of_caller(frame: FrameType | None = None) -> str:
    """Returns file:line of the innermost frame of the user's code at or above `frame`, or here."""
    return of_stack(reversed([*traceback.walk_stack(frame or inspect.currentframe())]))


def _short(file: str) -> str:
    """Returns the path below the working directory, or its last three parts if it is outside."""
    relative = os.path.relpath(file)
    return relative if not relative.startswith("..") else "/".join(Path(file).parts[-3:])
