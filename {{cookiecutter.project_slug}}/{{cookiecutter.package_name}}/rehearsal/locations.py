"""Returns where code is defined, as file:line, for sentences that lead a reader to it."""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

LIBRARIES = ("site-packages", "dist-packages", "<", sysconfig.get_path("stdlib"))
LOOP = ("loop.py", "hooks.py", "cli.py", "__main__.py")  # this package's machinery, through which every error passes


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
        if is_in_project(frame.f_code.co_filename):
            found = f"{_short(frame.f_code.co_filename)}:{line}"
    return found


def frames_of(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """The stack whose innermost frame is `frame`, outermost first."""
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def is_in_project(file: str) -> bool:
    """Whether a user of this project may have written it: no library, and not what every error passes through."""
    package = Path(__file__).parents[1]
    is_machinery = Path(file).parent == Path(__file__).parent or Path(file) in [package / name for name in LOOP]
    return not is_machinery and not any(part in file for part in LIBRARIES)


def _short(file: str) -> str:
    """Relative to the working directory where it is below it, else the last three parts."""
    relative = os.path.relpath(file)
    return relative if not relative.startswith("..") else "/".join(Path(file).parts[-3:])
