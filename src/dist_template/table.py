"""Tables of text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

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
        lines = []
        for row in (self.head, *self.rows):
            cells = (" ".join(cell.split()) for cell in row)
            lines.append([cell if len(cell) <= CELL else f"{cell[: CELL - 1]}…" for cell in cells])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = [self.title]
        for line in lines:
            texts.append(in_columns(line, widths))
        return "\n".join(filter(None, [*texts, self.note]))


def in_columns(cells: Iterable[str], widths: Iterable[int]) -> str:
    """Returns one line of a table on a terminal."""
    return "  ".join(map(str.ljust, cells, widths)).rstrip()


def shown(value: object) -> str:
    """Returns a configuration's value as YAML writes it on one line."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)
