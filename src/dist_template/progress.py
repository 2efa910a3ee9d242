"""Progress of a verb's long phases: steps, rate and time left of a loop, or the time of what cannot
be counted; in place on a terminal, else a line now and then.

It goes to standard error: standard output is the verb's result."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

__all__ = ["Progress", "running"]

LINE_EVERY_S = 10.0  # between two lines of a log file, as for training and `prepare`


class Progress:
    """Prints "title: 120/400 batches  35 per s  eta 0:00:08".

    Args:
        title: The verb, and what it is about.
        unit: What is counted, in plural.
        total: How many there are. None: unknown, and so is the time left."""

    def __init__(self, title: str, unit: str, total: int | None) -> None:
        self._title, self._unit, self._total = title, unit, total
        self._is_terminal = sys.stderr.isatty()
        self._num = 0
        self._started = self._printed = time.monotonic()

    def step(self) -> None:
        """Counts one. A loop that takes less than LINE_EVERY_S prints nothing into a log file."""
        self._num += 1
        now = time.monotonic()
        every = 0.1 if self._is_terminal else LINE_EVERY_S
        if now - self._printed < every:
            return
        self._printed = now
        line = self._line(now - self._started)
        _show(line)

    def done(self) -> None:
        """Removes the line from a terminal."""
        if self._is_terminal:
            _show("")

    def over(self, items: Iterable) -> Iterator:
        """Yields `items`, and counts each when the loop's body is through with it."""
        try:
            for item in items:
                yield item
                self.step()
        finally:
            self.done()

    def _line(self, seconds: float) -> str:
        rate = self._num / max(seconds, 1e-9)
        of_total = f"/{self._total}" if self._total else ""
        line = f"{self._title}: {self._num}{of_total} {self._unit}  {rate:.3g} per s"
        if self._total and self._total >= self._num:
            left = int((self._total - self._num) / max(rate, 1e-9))
            line += f"  eta {timedelta(seconds=left)}"
        return line


@contextmanager
def running(title: str) -> Generator[None]:
    """Prints "title, 20 s" while its body runs: for a phase whose steps nobody counts."""
    is_terminal, started = sys.stderr.isatty(), time.monotonic()
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(1.0 if is_terminal else LINE_EVERY_S):
            _show(f"{title}, {time.monotonic() - started:.0f} s")

    thread = threading.Thread(target=show, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if is_terminal:
            _show("")


def _show(line: str) -> None:
    """Prints a line, on a terminal in place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", flush=True, file=sys.stderr)
    else:
        print(line, flush=True, file=sys.stderr)
