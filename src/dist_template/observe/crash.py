"""Prints a crash in a few lines; the traceback is in crash/ of the run's folder.

callbacks/crash.py writes the records. This file does not import torch: a process that is out of
memory should import as little as possible."""

import json
import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from .. import hooks
from ..errors import Exit, first_line, is_disk_full
from ..project import is_users

__all__ = ["record_of", "sentence"]

RECORD = "crash_record"  # attribute of an exception: path of what callbacks/crash.py recorded
NUM_LINES = 4  # lines of the user's code that are printed
DISK_FULL = (
    "error: a disk is full ({}): free space, then give the same command again; the run resumes "
    "from its checkpoints"
)
ATTEMPT = ("DIST_JOB_STARTED", "TORCHELASTIC_RESTART_COUNT")


def attempt() -> str:
    """Returns an identifier that all ranks share and that differs after a restart."""
    return "-".join(os.environ.get(name, "") for name in ATTEMPT)


def own_lines(error: BaseException) -> list[str]:
    """Returns the last lines of the traceback that are in the user's code, the innermost last."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if is_users(frame.filename) and path.name != "__main__.py":
            if path.is_relative_to(Path.cwd()):
                path = path.relative_to(Path.cwd())
            found.append(f"{path}:{frame.lineno} in {frame.name}: {frame.line}")
    return found[-NUM_LINES:]


def record_of(error: BaseException | None) -> Path | None:
    """Returns the crash record of `error`, or of the exception that it was raised after."""
    while error is not None:
        path = vars(error).get(RECORD)
        if path:
            return Path(path)
        error = error.__context__
    return None


def sentence(record: dict[str, Any]) -> str:
    """Returns "rank 1 on node3, step 13, micro-batch 1, forward, in model.head: KeyError: 'x'"."""
    place = f"rank {record['rank']} on {record['host']}, {record['place']}"
    if record["module"]:
        place += f", in {record['module']}"
    return f"{place}: {record['error']}: {first_line(record['message'])}"


def print_crash(error: Exception) -> Exit:
    """Prints each distinct error once, with the texts of the hooks, and returns the exit code.
    Prints the traceback of an error before training without the user's code, or if the crash record
    cannot be read: no error is lost."""
    code, parts = Exit.FAILED, None
    path = record_of(error)
    if path is not None:
        with suppress(Exception):  # any error of this report matters less than the crash
            record = json.loads(path.read_text(encoding="utf-8"))
            texts = []
            if _is_first(path.parent, record):
                texts = ["\n    ".join([f"\n{sentence(record)}", *record["own_lines"]])]
                where = path.with_suffix(".txt")
                texts.append(f"the traceback is in {where}; TRACEBACK=1 prints it here")
            parts = texts
            # If not one step fitted, a restart would run out of memory at the same place.
            if record["kind"] == "out_of_memory" and record["step"] <= record["first_step"]:
                code = Exit.OUT_OF_MEMORY
    elif is_disk_full(error):
        parts = [DISK_FULL.format(first_line(error))]
    else:
        lines = own_lines(error)
        if lines:
            text = "\n    ".join([f"error: {type(error).__name__}: {first_line(error)}", *lines])
            parts = [text, "TRACEBACK=1 prints the traceback"]
    if parts is None or os.environ.get("TRACEBACK", "0") != "0":
        traceback.print_exception(error)
    if parts == []:  # another rank has printed the same error
        return code
    # The sentence first, then what the hooks add, then where the traceback is.
    texts = [*hooks.call("on_crash", error)]
    if parts:
        texts = [parts[0], *texts, *parts[1:]]
    text = "\n\n".join(filter(None, texts))
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


def _is_first(folder: Path, record: dict[str, Any]) -> bool:
    """Returns whether this rank is the first with this error, so that it prints. Digits are
    ignored, and so is the message of an out-of-memory error."""
    what = f"{record['error']} {record['message']}"
    if record["kind"] == "out_of_memory":
        what = record["kind"]
    what = record["attempt"] + re.sub(r"\d", "", what)
    try:
        os.close(os.open(folder / f".printed-{crc32(what.encode()):08x}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
