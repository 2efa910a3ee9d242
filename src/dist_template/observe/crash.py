"""Prints a crash in a few lines; the traceback is in crash/ of the run's folder.

callbacks/crash.py writes the records. This file does not import torch: a process that is out of
memory should import as little as possible.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from .. import hooks
from ..errors import Exit, first_line, is_disk_full
from ..project import is_users

RECORD = "crash_record"  # attribute of an exception: path of what callbacks/crash.py recorded
NUM_LINES = 4  # lines of the user's code that are printed
DISK_FULL = (
    "error: a disk is full ({}): free space, then give the same command again; the run resumes"
    " from its checkpoints"
)
ATTEMPT = ("DIST_JOB_STARTED", "TORCHELASTIC_RESTART_COUNT")
LIBRARY = Path(__file__).parents[1]


def attempt() -> str:
    """Returns an identifier that all ranks share and that differs after a restart."""
    return "-".join(os.environ.get(name, "") for name in ATTEMPT)


def own_lines(error: BaseException) -> list[str]:
    """Returns the last lines of the traceback that are in the user's code, the innermost last."""
    found = []
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    for frame in [f for f in frames if Path(f.filename).name != "__main__.py"][-NUM_LINES:]:
        path = Path(frame.filename)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        found.append(f"{shown}:{frame.lineno} in {frame.name}: {frame.line}")
    return found


def record_of(error: BaseException | None) -> Path | None:
    """Returns the crash record of `error`, or of the exception that it was raised after."""
    while error is not None:
        if path := vars(error).get(RECORD):
            return Path(path)
        error = error.__context__
    return None


def sentence(record: dict[str, Any]) -> str:
    """Returns "rank 1 on node3, step 13, micro-batch 1, forward, in model.head: KeyError: 'x'"."""
    module = f", in {record['module']}" if record["module"] else ""
    error = f"{record['error']}: {first_line(record['message'])}"
    return f"rank {record['rank']} on {record['host']}, {record['place']}{module}: {error}"


def print_crash(error: Exception) -> Exit:
    """Prints each distinct error once, with the texts of the hooks, and returns the exit code.

    Prints the traceback if this library raised the error before training, or if the crash record
    cannot be read: no error is lost.
    """
    code, parts = Exit.FAILED, None
    if path := record_of(error):
        with suppress(Exception):  # any error of this report matters less than the crash
            record = json.loads(path.read_text(encoding="utf-8"))
            own = [f"    {line}" for line in record["own_lines"]]
            end = f"the traceback is in {path.with_suffix('.txt')}; TRACEBACK=1 prints it here"
            is_first = _is_first(path.parent, record)
            parts = ["\n".join(["", sentence(record), *own]), end] if is_first else []
            # If not one step fitted, a restart would run out of memory at the same place.
            if record["kind"] == "out_of_memory" and record["step"] <= record["first_step"]:
                code = Exit.OUT_OF_MEMORY
    elif is_disk_full(error):
        parts = [DISK_FULL.format(first_line(error))]
    elif place := _before_training(error):
        parts = [place, "TRACEBACK=1 prints the traceback"]
    if parts is None or os.environ.get("TRACEBACK", "0") != "0":
        traceback.print_exception(error)
    if parts == []:  # another rank has printed the same error
        return code
    first, *last = parts or [""]
    text = "\n\n".join(filter(None, [first, *hooks.on_crash(error), *last]))
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


def _before_training(error: BaseException) -> str:
    """Describes an error before training; "" if this library raised it and not the user's code."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [file for file in files if is_users(str(file)) or file.is_relative_to(LIBRARY)]
    if not ours or ours[-1].is_relative_to(LIBRARY) or ours[-1].name == "__main__.py":
        return ""
    place = "while tokenizing, " if LIBRARY / "text" / "cache" / "build.py" in files else ""
    lines = [f"error: {place}{type(error).__name__}: {first_line(error)}"]
    return "\n".join([*lines, *(f"    {line}" for line in own_lines(error))])


def _is_first(folder: Path, record: dict[str, Any]) -> bool:
    """Returns whether this rank is the first with this error, so that it prints.

    Digits are ignored, and so is the message of an out-of-memory error.
    """
    is_memory = record["kind"] == "out_of_memory"
    what = record["kind"] if is_memory else f"{record['error']} {record['message']}"
    what = record["attempt"] + "".join(letter for letter in what if not letter.isdigit())
    try:
        os.close(os.open(folder / f".printed-{crc32(what.encode()):08x}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
