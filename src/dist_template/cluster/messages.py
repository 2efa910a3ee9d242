"""Buffers warnings on ranks other than 0, so that rank 0 prints each once for all ranks.

Otherwise 64 ranks print the same line 64 times. A warning is a message of Python's `warnings`, or of `logging` at level
WARNING to a terminal. callbacks/messages.py sends them to rank 0. Every rank prints errors at once, and so do libraries
in C++. Outside training each process flushes its own buffer, at its exit and in a hang. Only a SIGKILL loses warnings.

No slow imports here: libraries also warn while they are imported.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["MESSAGES"]

MAX_WARNINGS = 1000  # distinct warnings of a process; it prints further ones itself


class Messages:
    """The warnings of this process. `MESSAGES` is the only instance."""

    def __init__(self) -> None:
        self.reported: set[str] = set()  # printed here or by rank 0, or buffered
        self._buffer: list[str] = []
        self._process = 0

    def listen(self) -> None:
        """Starts buffering in this process; forked children print their own warnings."""
        if not self._process:
            atexit.register(self.flush)
        self._process = os.getpid()
        logging.captureWarnings(False)  # a `catch_warnings` block may have ended the capture
        logging.captureWarnings(True)
        python = logging.getLogger("py.warnings")
        if not any(isinstance(handler, WarningPrinter) for handler in python.handlers):
            python.addHandler(WarningPrinter())
        python.propagate = False
        python.setLevel(logging.WARNING)
        if not issubclass(logging.getLoggerClass(), FilteredLogger):
            logging.setLoggerClass(FilteredLogger)
        filter_warnings_of(logging.lastResort)
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
            for handler in getattr(logger, "handlers", ()):  # some are placeholders
                filter_warnings_of(handler)

    def buffer(self, text: str) -> bool:
        """Buffers `text` and returns True, or returns False if this process must print it."""
        if os.getpid() != self._process:
            return False
        is_new = text not in self.reported
        if is_new and len(self.reported) >= MAX_WARNINGS:
            return False
        self.reported.add(text)
        if is_rank_zero():
            return False
        if is_new:
            self._buffer.append(text[:2000])
        return True

    def drain(self) -> list[str]:
        """Returns the buffered warnings and empties the buffer."""
        buffer, self._buffer = self._buffer, []
        return buffer

    def flush(self) -> None:
        """Prints the buffered warnings, also while another thread holds Python's stderr lock."""
        environment = os.environ
        rank = environment.get("RANK") or environment.get("LOCAL_RANK")
        for text in self.drain():
            os.write(2, f"rank {rank or environment.get('SLURM_PROCID')}: {text}\n".encode())


def is_rank_zero() -> bool:
    """Returns whether this is rank 0, by the launchers' variables in Lightning's order."""
    environment = os.environ
    if "RANK" in environment:
        return environment["RANK"] == "0"
    if "LOCAL_RANK" in environment:
        nodes = {environment.get("NODE_RANK", "0"), environment.get("GROUP_RANK", "0")}
        return environment["LOCAL_RANK"] == "0" and nodes == {"0"}
    return environment.get("SLURM_PROCID", "0") == "0"


MESSAGES = Messages()


class WarningPrinter(logging.Handler):
    """Prints messages of `warnings`, in Python's format, unless they are buffered."""

    def emit(self, record: logging.LogRecord) -> None:
        formatted = record.getMessage()
        # without the source line: "Category: message (folder/file.py:line)"
        text = formatted.strip()
        if found := re.match(r"(.+?):(\d+): (.*?)(?:\n  [^\n]*)?\s*\Z", formatted, re.DOTALL):
            text = f"{found[3]} ({'/'.join(Path(found[1]).parts[-2:])}:{found[2]})"
        if not MESSAGES.buffer(text):
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
        if not logging.WARNING <= record.levelno < logging.ERROR:
            return True
        stream = self.handler.stream
        is_terminal = stream in (sys.stdout, sys.stderr)
        with suppress(AttributeError, OSError, ValueError):  # in memory, or closed
            is_terminal = is_terminal or stream.fileno() in (1, 2)
        return not (is_terminal and MESSAGES.buffer(f"{record.name}: {record.getMessage()}"))


def filter_warnings_of(handler: logging.Handler | None) -> None:
    if isinstance(handler, logging.StreamHandler):
        if not any(isinstance(known, NotBuffered) for known in handler.filters):
            handler.addFilter(NotBuffered(handler))
