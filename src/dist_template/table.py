"""Tables of text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CELL = 60  # characters of a cell on a terminal; longer ones are truncated


@dataclass(frozen=True)
class Table:
    """Text in rows and columns: `head` has a title per column; each row has as many cells as
    `head`.

    `title` and `note`, a sentence below the table, may be empty.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""

    def as_text(self) -> str:
        lines = [[_truncated(cell) for cell in line] for line in (self.head, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = [in_columns(line, widths) for line in lines]
        return "\n".join(line for line in (self.title, *texts, self.note) if line)


def in_columns(cells: Iterable[str], widths: Iterable[int]) -> str:
    """Returns one line of a table on a terminal."""
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def shown(value: Any) -> str:
    """Returns a configuration's value as YAML writes it on one line."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _truncated(cell: str) -> str:
    line = " ".join(cell.split())
    return line if len(line) <= CELL else line[: CELL - 1] + "…"
