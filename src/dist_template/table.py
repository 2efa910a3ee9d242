"""Tables of text."""

from dataclasses import dataclass

__all__ = ["Table"]

CELL = 60  # characters of a cell on a terminal; longer ones are truncated


@dataclass(frozen=True)
class Table:
    """Text in rows and columns: `head` has a title per column; each row has as many cells as
    `head`. `title` and `note`, a sentence below the table, may be empty."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""

    def as_text(self) -> str:
        texts, widths = [], [0] * len(self.head)
        for row in (self.head, *self.rows):
            texts.append(list(map(_truncated, row)))
            widths = list(map(max, widths, map(len, texts[-1])))
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in texts]
        return "\n".join(filter(None, [self.title, *lines, self.note]))


def _truncated(cell: str) -> str:
    line = " ".join(cell.split())
    return line if len(line) <= CELL else f"{line[: CELL - 1]}…"
