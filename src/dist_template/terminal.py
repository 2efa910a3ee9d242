"""Output as plain text: a run, a store or a plugin of somebody else cannot steer the terminal.

An escape sequence moves the cursor, changes the window's title or writes into the clipboard. What a
verb prints passes `PlainText`, which shows control characters as codes. This is the only place: no
verb has to remember it."""

import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from .errors import with_codes

__all__ = ["allow_styles", "open_streams", "plain_output"]

# What this library and progress bars (tqdm) write at the start of a call of `write`, or alone: the
# start of the line, and on a terminal an erased line, lines up, and the two colours of `prepare`.
LINE_START = re.compile(r"\r(?: *\r)?")
ON_TERMINAL = re.compile(r"\r(?:\x1b\[K| *\r)?|(?:\n|\x1b\[A|\x1b\[(?:0|32|33)m)+\Z")


# Colours, moves of the cursor and erased lines: no title of a window, and no clipboard.
STYLE = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r)")


def plain(text: str) -> str:
    """Returns a text with control characters as codes, and with line feeds for CR LF."""
    return with_codes(text.replace("\r\n", "\n"))


class PlainText:
    """A text stream that writes plain text to another; everything else is the other's."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.has_styles = False

    def write(self, text: str) -> int:
        if self.has_styles:
            parts = STYLE.split(text)  # every second one is a sequence
            parts[::2] = map(plain, parts[::2])
            self.stream.write("".join(parts))
            return len(text)
        own = (ON_TERMINAL if self.stream.isatty() else LINE_START).match(text)
        start = own[0] if own else ""
        self.stream.write(start + plain(text[len(start) :]))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def allow_styles() -> None:
    """Lets colours and moves of the cursor pass from now on, for a training whose user has chosen a
    progress bar of rich."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, PlainText):
            stream.has_styles = True


def open_streams() -> None:
    """Opens standard output and standard error if they were closed before the start, as by `>&-`:
    Python has None in their place, which nothing can write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (until the process ends)


@contextmanager
def plain_output() -> Generator[None]:
    """Inside, standard output and standard error are plain text."""
    before = sys.stdout, sys.stderr
    os.environ.setdefault("PYTHON_COLORS", "0")  # of argparse and tracebacks, from Python 3.13 on
    sys.stdout, sys.stderr = (
        stream if isinstance(stream, PlainText) else PlainText(stream) for stream in before
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
