"""Progress of a verb's long loop: steps, rate and time left; in place on a terminal, else a line
now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta

__all__ = ["Progress"]

LINE_EVERY_S = 10.0  # between two lines of a log file, as for training and `prepare`


class Progress:
    """Prints "title: 120/400 batches  35 per s  eta 0:00:08" to stdout.

    Args:
        title: The verb, and what it is about.
        unit: What is counted, in plural.
        total: How many there are. None: unknown, and so is the time left."""

    def __init__(self, title: str, unit: str, total: int | None) -> None:
        self._title, self._unit, self._total = title, unit, total
        self._is_terminal = sys.stdout.isatty()
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
        print(f"\r\x1b[K{line}" if self._is_terminal else line, end=self._end, flush=True)

    def done(self) -> None:
        """Removes the line from a terminal."""
        if self._is_terminal:
            print("\r\x1b[K", end="", flush=True)

    def over(self, items: Iterable) -> Iterator:
        """Yields `items`, and counts each when the loop's body is through with it."""
        try:
            for item in items:
                yield item
                self.step()
        finally:
            self.done()

    @property
    def _end(self) -> str:
        return "" if self._is_terminal else "\n"

    def _line(self, seconds: float) -> str:
        rate = self._num / max(seconds, 1e-9)
        of_total = f"/{self._total}" if self._total else ""
        line = f"{self._title}: {self._num}{of_total} {self._unit}  {rate:.3g} per s"
        if self._total and self._total >= self._num:
            left = int((self._total - self._num) / max(rate, 1e-9))
            line += f"  eta {timedelta(seconds=left)}"
        return line
