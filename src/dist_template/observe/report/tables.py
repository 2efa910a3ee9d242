"""A table, and how it reads on a terminal and in Markdown."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import Any

CELL = 44  # characters of a cell on a terminal


@dataclass(frozen=True)
class Table:
    """Text in rows and columns.

    Args:
        title: May be empty.
        head: Of each column; all empty: none is shown.
        rows: As many cells in each.
        note: A sentence below. Empty: none.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""

    def as_text(self) -> str:
        lines = [[_cut(cell) for cell in line] for line in (self.head, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        told = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join(line.rstrip() for line in (self.title, "", told[0], rule, *told[1:], self.note) if line)

    def as_markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *([_in_markdown(cell) for cell in row] for row in self.rows)]
        told = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join(
            [f"### {_in_markdown(self.title)}\n", *told] if self.title else told
        ) + f"\n\n{self.note}" * bool(self.note)


def shown(value: Any) -> str:
    """A configuration's value as YAML has it on one line."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _cut(cell: str) -> str:
    line = " ".join(cell.split())
    return line if len(line) <= CELL else line[: CELL - 1] + "…"


def _in_markdown(cell: str) -> str:
    return " ".join(html.escape(cell, quote=False).replace("|", "\\|").split())
