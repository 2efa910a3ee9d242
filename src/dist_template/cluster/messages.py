"""Warnings of this process, kept back where it is not rank 0, which tells them once for all ranks.

What goes through Python's `warnings`, and through `logging` at the level WARNING to a terminal, is a warning: 64 ranks
would print the same line 64 times. callbacks/messages.py brings them to rank 0. Errors are printed at once, by every
rank, and so is what libraries in C++ print. A process that waits for no log step any more prints what it has kept
itself: at its end, in a hang, and after two minutes; only what kills it at once (SIGKILL) takes a warning with it.

Nothing heavy is imported here: libraries warn while they are imported, too.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, TextIO

HOLD_S = 120.0
LONGEST = 2000  # characters of a warning
MOST = 1000  # different warnings of a process; what comes beyond is printed by it


class Messages:
    """Of this process; `MESSAGES` is the one there is."""

    def __init__(self) -> None:
        self.told: set[str] = set()  # was printed, here or by rank 0, or is kept
        self._kept: list[str] = []
        self._process = 0
        self._timer: threading.Timer | None = None

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def listen(self) -> None:
        """From now on, in this process; those that are forked from it print theirs."""
        if not self._process:
            atexit.register(self.flush)
        self._process = os.getpid()
        warnings.showwarning = _show  # ty: ignore[invalid-assignment]
        logging.StreamHandler.emit = _emit  # ty: ignore[invalid-assignment]

    def keeps(self, text: str) -> bool:
        """Take `text`, unless it is for this process to print."""
        if os.getpid() != self._process:
            return False
        is_new = text not in self.told
        if is_new and len(self.told) >= MOST:
            return False
        self.told.add(text)
        if is_rank_zero():
            return False
        if is_new:
            self._kept.append(text[:LONGEST])
            if self._timer is None:
                self._timer = threading.Timer(HOLD_S, self.flush)
                self._timer.daemon = True
                self._timer.start()
        return True

    def take(self) -> list[str]:
        """What was kept, to be told elsewhere."""
        kept, self._kept = self._kept, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return kept

    def flush(self) -> None:
        """Print what was kept; from any thread, whoever holds Python's own stderr."""
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID")
        for text in self.take():
            os.write(2, f"rank {rank}: {text}\n".encode())


def is_rank_zero() -> bool:
    """By what launchers set, in Lightning's order; known before anything is imported."""
    environment = os.environ
    if "RANK" in environment:
        return environment["RANK"] == "0"
    if "LOCAL_RANK" in environment:
        nodes = (environment.get("NODE_RANK"), environment.get("GROUP_RANK"))
        return environment["LOCAL_RANK"] == "0" and all(node in (None, "0") for node in nodes)
    return environment.get("SLURM_PROCID", "0") == "0"


MESSAGES = Messages()
_show_as_before, _emit_as_before = warnings.showwarning, logging.StreamHandler.emit


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    place = "/".join(Path(filename).parts[-2:])
    if file is not None or not MESSAGES.keeps(f"{category.__name__}: {message} ({place}:{lineno})"):
        _show_as_before(message, category, filename, lineno, file, line)


def _emit(handler: Any, record: logging.LogRecord) -> None:
    is_warning = logging.WARNING <= record.levelno < logging.ERROR
    if not (is_warning and _is_terminal(handler.stream) and MESSAGES.keeps(f"{record.name}: {record.getMessage()}")):
        _emit_as_before(handler, record)


def _is_terminal(stream: Any) -> bool:
    """Whether it is this process's output, and no file of a library's own."""
    try:
        return stream in (sys.stdout, sys.stderr) or stream.fileno() in (1, 2)
    except (AttributeError, OSError, ValueError):  # in memory, or closed
        return False
