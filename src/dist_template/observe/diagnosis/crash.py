"""What the user reads when training crashes: what happened, why, what to change; the traceback is in the run's folder.

Without torch: a process whose memory is used up should not import more than it has to.
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

NOTED = "noted_in"  # an exception's attribute: the record that callbacks/crash.py has written of it
NUM_LINES = 4  # of the user's own
FULL = "error: a disk is full ({}): free space, then give the same command again; the run resumes from its checkpoints"
LIBRARY = Path(__file__).parents[2]


def attempt() -> str:
    """The same for all ranks of one start, another one after a restart."""
    return "-".join(os.environ.get(name, "") for name in ("DIST_JOB_STARTED", "TORCHELASTIC_RESTART_COUNT"))


def own_lines(error: BaseException) -> list[str]:
    """Of the traceback the last lines that are in no library, the innermost last."""
    found = []
    for frame in _own_frames(error)[-NUM_LINES:]:
        path = Path(frame.filename)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        found.append(f"{shown}:{frame.lineno} in {frame.name}: {frame.line}")
    return found


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if is_users(f.filename) and Path(f.filename).name != "__main__.py"]


def _before_training(error: BaseException) -> str:
    """Reports an error that no callback could note; "" if it was raised by this library and not by the user's code."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [file for file in files if is_users(str(file)) or file.is_relative_to(LIBRARY)]
    edited = bool(ours) and not ours[-1].is_relative_to(LIBRARY) and ours[-1].name != "__main__.py"
    place = "while tokenizing, " if LIBRARY / "text" / "build.py" in files else ""
    told = [f"error: {place}{type(error).__name__}: {first_line(error)}", *(f"    {line}" for line in own_lines(error))]
    return "\n".join([*told, "\nTRACEBACK=1 prints the traceback"]) if edited else ""


def noted(error: BaseException | None) -> Path | None:
    """Where the crash that `error` is of, or came after, was written down."""
    while error is not None:
        if path := vars(error).get(NOTED):
            return Path(path)
        error = error.__context__
    return None


def tell(error: BaseException) -> Exit:
    """Print the diagnosis in place of the traceback, once for each distinct error; the exit code.

    Where there is nothing to read, or reading fails, the plain traceback is printed: no error is lost.
    """
    if (path := noted(error)) is None:
        if os.environ.get("TRACEBACK", "0") == "0" and is_disk_full(error):
            print(FULL.format(first_line(error)), file=sys.stderr, flush=True)
        elif os.environ.get("TRACEBACK", "0") == "0" and (text := _before_training(error)):
            print(text, file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        return Exit.FAILED
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        text = "\n".join(_lines(path, record)) if _is_ours(path.parent, record) else ""
        code = exit_code(record)
    except Exception:  # whatever it is, it is not what the user has to know
        traceback.print_exception(error)
        return Exit.FAILED
    if os.environ.get("TRACEBACK", "0") != "0":
        traceback.print_exception(error)
    if text:
        print(f"\n{text}", file=sys.stderr, flush=True)
    return code


def exit_code(record: dict[str, Any]) -> Exit:
    """A restart would run out of memory at the same place, if not one step fitted; later it may have been chance."""
    fits = record["step"] > record["first_step"]
    return Exit.OUT_OF_MEMORY if record["kind"] == "out_of_memory" and not fits else Exit.FAILED


def _is_ours(folder: Path, record: dict[str, Any]) -> bool:
    """Whether this rank is the one that tells of the error: the first that says so.

    Ranks that run out of memory do so in different places and for different numbers of bytes.
    """
    what = record["kind"] if record["kind"] == "out_of_memory" else f"{record['error']} {record['message']}"
    what = record["attempt"] + "".join(letter for letter in what if not letter.isdigit())
    name = f".told-{crc32(what.encode()):08x}"
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _lines(path: Path, record: dict[str, Any]) -> Iterator[str]:
    """One sentence, the user's own lines, what the rules say, and where the rest is."""
    yield sentence(record)
    yield from (f"    {line}" for line in record["own_lines"])
    findings = [finding for finding in diagnose(_history(path, record)) if finding.rule != "crashed"]
    memory = [finding for finding in findings if finding.rule == "out_of_memory"]
    rest = [finding for finding in findings if finding not in memory and finding.level != "info"]
    for each in (as_text(memory, everything=True), as_text(rest)):
        if each:
            yield f"\n{each}"
    yield f"\nthe traceback is in {path.with_suffix('.txt')}; TRACEBACK=1 prints it here"


def sentence(record: dict[str, Any]) -> str:
    """What happened: "rank 1 on node3, step 13, micro-batch 1, forward, in model.layers.2.mlp: KeyError: 'x'"."""
    module = f", in {record['module']}" if record["module"] else ""
    return f"rank {record['rank']} on {record['host']}, {record['place']}{module}: {error_of(record)}"


def error_of(record: dict[str, Any]) -> str:
    return f"{record['error']}: {first_line(record['message'])}"


def _history(path: Path, record: dict[str, Any]) -> History:
    folder = path.parent.parent
    try:
        return read_run(folder)
    except InputError:  # it crashed before anything else was written
        return History(folder, crashes=[record])
