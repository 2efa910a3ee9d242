"""Buffers warnings on ranks other than 0, so that rank 0 prints each once for all ranks.

Otherwise 64 ranks print the same line 64 times. A warning is a message of Python's `warnings`, or of `logging` at level
WARNING to a terminal. callbacks/messages.py sends them to rank 0. Every rank prints errors at once, and so do libraries
in C++. Outside training each process flushes its own buffer: at its exit, in a hang, and after two minutes. Only a
SIGKILL loses warnings.

No slow imports here: libraries also warn while they are imported.
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
MOST = 1000  # distinct warnings of a process; it prints further ones itself


class Messages:
    """The warnings of this process. `MESSAGES` is the only instance."""

    def __init__(self) -> None:
        self.reported: set[str] = set()  # printed here or by rank 0, or buffered
        self._buffer: list[str] = []
        self._process = 0
        self._timer: threading.Timer | None = None

    @property
    def num_buffered(self) -> int:
        return len(self._buffer)

    def listen(self) -> None:
        """Starts buffering in this process; forked children print their own warnings."""
        if not self._process:
            atexit.register(self.flush)
        self._process = os.getpid()
        logging.captureWarnings(False)  # a `catch_warnings` block elsewhere may have ended the capture
        logging.captureWarnings(True)
        python = logging.getLogger("py.warnings")
        if not any(isinstance(handler, WarningPrinter) for handler in python.handlers):
            python.addHandler(WarningPrinter())
        python.propagate = False
        python.setLevel(logging.WARNING)
        if not issubclass(logging.getLoggerClass(), FilteredLogger):
            logging.setLoggerClass(FilteredLogger)
        known = [logging.root, *logging.root.manager.loggerDict.values()]  # some are placeholders
        handlers = [handler for logger in known if isinstance(logger, logging.Logger) for handler in logger.handlers]
        for handler in [logging.lastResort, *handlers]:
            filter_warnings_of(handler)

    def buffer(self, text: str) -> bool:
        """Buffers `text` and returns True, or returns False if this process must print it."""
        if os.getpid() != self._process:
            return False
        is_new = text not in self.reported
        if is_new and len(self.reported) >= MOST:
            return False
        self.reported.add(text)
        if is_rank_zero():
            return False
        if is_new:
            self._buffer.append(text[:LONGEST])
            if self._timer is None:
                self._timer = threading.Timer(HOLD_S, self.flush)
                self._timer.daemon = True
                self._timer.start()
        return True

    def take(self) -> list[str]:
        """Returns the buffered warnings and empties the buffer."""
        buffer, self._buffer = self._buffer, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return buffer

    def flush(self) -> None:
        """Prints the buffered warnings; from any thread, also while another holds Python's stderr lock."""
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID")
        for text in self.take():
            os.write(2, f"rank {rank}: {text}\n".encode())


def is_rank_zero() -> bool:
    """Returns whether this is rank 0, from the launchers' variables in Lightning's order, without imports."""
    environment = os.environ
    if "RANK" in environment:
        return environment["RANK"] == "0"
    if "LOCAL_RANK" in environment:
        nodes = (environment.get("NODE_RANK"), environment.get("GROUP_RANK"))
        return environment["LOCAL_RANK"] == "0" and all(node in (None, "0") for node in nodes)
    return environment.get("SLURM_PROCID", "0") == "0"


MESSAGES = Messages()


class WarningPrinter(logging.Handler):
    """Prints messages of `warnings`, in Python's format, unless they are buffered."""

    def emit(self, record: logging.LogRecord) -> None:
        formatted = record.getMessage()
        if not MESSAGES.buffer(_without_source(formatted)):
            print(formatted, end="", file=sys.stderr, flush=True)


class FilteredLogger(logging.Logger):
    """A logger whose terminal handlers pass only the warnings that this process prints."""

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802  (logging's name)
        filter_warnings_of(hdlr)
        super().addHandler(hdlr)


class NotBuffered(logging.Filter):
    """Drops a handler's warnings that `MESSAGES` buffers."""

    def __init__(self, handler: logging.StreamHandler) -> None:
        super().__init__()
        self.handler = handler

    def filter(self, record: logging.LogRecord) -> bool:
        is_warning = logging.WARNING <= record.levelno < logging.ERROR and _is_terminal(self.handler.stream)
        return not (is_warning and MESSAGES.buffer(f"{record.name}: {record.getMessage()}"))


def filter_warnings_of(handler: logging.Handler | None) -> None:
    if isinstance(handler, logging.StreamHandler) and not any(isinstance(one, NotBuffered) for one in handler.filters):
        handler.addFilter(NotBuffered(handler))


def _without_source(formatted: str) -> str:
    """Returns "Category: message (folder/file.py:line)" from the output of `warnings.formatwarning`."""
    found = re.match(r"(.+?):(\d+): (.*?)(?:\n  [^\n]*)?\s*\Z", formatted, re.DOTALL)
    if found is None:
        return formatted.strip()
    return f"{found[3]} ({'/'.join(Path(found[1]).parts[-2:])}:{found[2]})"


def _is_terminal(stream: Any) -> bool:
    """Returns whether `stream` is this process's stdout or stderr, and not a library's own file."""
    try:
        return stream in (sys.stdout, sys.stderr) or stream.fileno() in (1, 2)
    except (AttributeError, OSError, ValueError):  # in memory, or closed
        return False
