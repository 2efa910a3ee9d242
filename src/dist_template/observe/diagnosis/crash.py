"""Prints a diagnosis in place of the traceback when training crashes; crash/ has the traceback.

It does not import torch: a process that is out of memory should import as little as possible.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

from ...errors import Exit, InputError, first_line, is_disk_full
from ...project import is_users
from ..history.run import History, read_run
from .engine import diagnose
from .finding import as_text
from .rules.crashes import sentence

RECORD = "crash_record"  # attribute of an exception: path of what callbacks/crash.py recorded
OF_MEMORY = ("out_of_memory", "memory_grows", "memory_nearly_full")
NUM_LINES = 4  # lines of the user's code that are printed
DISK_FULL = (
    "error: a disk is full ({}): free space, then give the same command again; the run resumes"
    " from its checkpoints"
)
ATTEMPT = ("DIST_JOB_STARTED", "TORCHELASTIC_RESTART_COUNT")
LIBRARY = Path(__file__).parents[2]


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


def print_crash(error: BaseException) -> Exit:
    """Prints the diagnosis once for each distinct error, and returns the exit code.

    Prints the traceback if there is no crash record, or if the diagnosis fails: no error is lost.
    """
    wants_traceback = os.environ.get("TRACEBACK", "0") != "0"
    if (path := record_of(error)) is None:
        full = DISK_FULL.format(first_line(error)) if is_disk_full(error) else ""
        text = full or _before_training(error)
        if wants_traceback or not text:
            traceback.print_exception(error)
        else:
            print(text, file=sys.stderr, flush=True)
        return Exit.FAILED
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        text = "\n".join(_lines(path, record)) if _is_first(path.parent, record) else ""
        # If not one step fitted, a restart would run out of memory at the same place.
        fitted = record["kind"] != "out_of_memory" or record["step"] > record["first_step"]
        code = Exit.FAILED if fitted else Exit.OUT_OF_MEMORY
    except Exception:  # any error of the diagnosis matters less than the crash
        traceback.print_exception(error)
        return Exit.FAILED
    if wants_traceback:
        traceback.print_exception(error)
    if text:
        print(f"\n{text}", file=sys.stderr, flush=True)
    return code


def _before_training(error: BaseException) -> str:
    """Describes an error before training; "" if this library raised it and not the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(frame.filename) for frame in frames]
    ours = [file for file in files if is_users(str(file)) or file.is_relative_to(LIBRARY)]
    if not ours or ours[-1].is_relative_to(LIBRARY) or ours[-1].name == "__main__.py":
        return ""
    is_tokenizing = any(frame.name == "build_cache" for frame in frames)
    place = "while tokenizing, " if is_tokenizing else ""
    lines = [f"error: {place}{type(error).__name__}: {first_line(error)}"]
    lines += [f"    {line}" for line in own_lines(error)]
    return "\n".join([*lines, "\nTRACEBACK=1 prints the traceback"])


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


def _lines(path: Path, record: dict[str, Any]) -> Iterator[str]:
    """Yields one sentence, lines of the user's code, the findings, and where the traceback is."""
    yield sentence(record)
    yield from (f"    {line}" for line in record["own_lines"])
    folder = path.parent.parent
    try:
        history = read_run(folder)
    except InputError:  # it crashed before anything else was written
        history = History(folder, crashes=[record])
    if record["kind"] == "out_of_memory":  # other findings have nothing to do with a crash
        findings = [each for each in diagnose(history) if each.rule in OF_MEMORY]
        yield f"\n{as_text(findings, full=True)}" if findings else ""
    yield f"\nthe traceback is in {path.with_suffix('.txt')}; TRACEBACK=1 prints it here"
