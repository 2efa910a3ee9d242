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
import re
import sys
import threading
from pathlib import Path
from typing import Any

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
        logging.captureWarnings(False)  # another's `catch_warnings` may have ended the capture unnoticed
        logging.captureWarnings(True)
        python = logging.getLogger("py.warnings")
        if not any(isinstance(handler, WarningPrinter) for handler in python.handlers):
            python.addHandler(WarningPrinter())
        python.propagate = False
        python.setLevel(logging.WARNING)
        if not issubclass(logging.getLoggerClass(), FilteredLogger):
            logging.setLoggerClass(FilteredLogger)
        known = [logging.root, *logging.root.manager.loggerDict.values()]  # some are only parts of a name
        handlers = [handler for logger in known if isinstance(logger, logging.Logger) for handler in logger.handlers]
        for handler in [logging.lastResort, *handlers]:
            keep_warnings_of(handler)

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


class WarningPrinter(logging.Handler):
    """Prints what went through `warnings`, as Python formats it, unless it is kept."""

    def emit(self, record: logging.LogRecord) -> None:
        formatted = record.getMessage()
        if not MESSAGES.keeps(_without_source(formatted)):
            print(formatted, end="", file=sys.stderr, flush=True)


class FilteredLogger(logging.Logger):
    """Loggers that libraries make from now on: their terminal handlers pass only warnings that this process prints."""

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802  (logging's name)
        keep_warnings_of(hdlr)
        super().addHandler(hdlr)


class NotKept(logging.Filter):
    """Drops a handler's warnings that `MESSAGES` keeps."""

    def __init__(self, handler: logging.StreamHandler) -> None:
        super().__init__()
        self.handler = handler

    def filter(self, record: logging.LogRecord) -> bool:
        is_warning = logging.WARNING <= record.levelno < logging.ERROR and _is_terminal(self.handler.stream)
        return not (is_warning and MESSAGES.keeps(f"{record.name}: {record.getMessage()}"))


def keep_warnings_of(handler: logging.Handler | None) -> None:
    if isinstance(handler, logging.StreamHandler) and not any(isinstance(one, NotKept) for one in handler.filters):
        handler.addFilter(NotKept(handler))


def _without_source(formatted: str) -> str:
    """Returns "Category: message (folder/file.py:line)" of what `warnings.formatwarning` made, without the code."""
    found = re.match(r"(.+?):(\d+): (.*?)(?:\n  [^\n]*)?\s*\Z", formatted, re.DOTALL)
    if found is None:
        return formatted.strip()
    return f"{found[3]} ({'/'.join(Path(found[1]).parts[-2:])}:{found[2]})"


def _is_terminal(stream: Any) -> bool:
    """Whether it is this process's output, and no file of a library's own."""
    try:
        return stream in (sys.stdout, sys.stderr) or stream.fileno() in (1, 2)
    except (AttributeError, OSError, ValueError):  # in memory, or closed
        return False
