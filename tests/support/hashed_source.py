"""Data sources with a fault; this file imports nothing heavy, because other processes import it."""

from __future__ import annotations

from collections.abc import Iterator

from dist_template.text import Source


class HashedSource(Source):
    """Yields documents from a set, whose order depends on the process's hash seed."""

    def documents(self) -> Iterator[tuple[str, str]]:
        for name in {f"{number}.txt" for number in range(50)}:
            yield name, f"text {name}"


class FailingSource(Source):
    """Cannot be read."""

    def documents(self) -> Iterator[tuple[str, str]]:
        raise OSError("no such shard")
