"""The same as Markdown, for a mail, an issue or a terminal: without curves."""

from __future__ import annotations

import html
import re

from ..diagnosis.finding import Finding, as_text
from ..history import goodput
from ..history.run import History
from .commands import resume
from .curves import not_finite
from .results import figures
from .sections import Section, of_one, of_several, status, what
from .tables import Table


def markdown(histories: list[History], names: list[str], findings: list[list[Finding]]) -> str:
    one = len(histories) == 1
    parts = [f"# {_inline(names[0])}", _inline(what(histories[0]))] if one else [f"# {len(histories)} runs compared"]
    for history, name, found in zip(histories, names, findings, strict=True):
        parts.append("## Verdict" if one else f"## {_inline(name)}")
        parts.append(f"{'' if found else 'No findings: no rule saw anything wrong. '}It {_inline(status(history))}.")
        parts += [as_text(found, markdown=True)] if found else []
        parts += [f"- {_inline(sentence)}" for sentence in not_finite(history)]
        parts += [f"Time: {goodput.describe(history.goodput)}."] if history.goodput else []
    if one:
        parts.append(Table("", ["", ""], [list(row) for row in figures(histories[0])]).as_markdown())
        sentence, command = resume(histories[0])
        parts += ["## Go on", f"{sentence}:", _block(command)] if command else []
    for section in of_one(histories[0]) if one else of_several(histories, names):
        parts += _section(section)
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    """Without what the page folds away."""
    told = [f"## {section.title}"]
    for part in section.parts:
        if isinstance(part, Table):
            told.append(part.as_markdown() if part.rows else part.note)
        elif not part.folded:
            told += [f"### {_inline(part.title)}", _block(part.body)]
    return told if len(told) > 1 else []


def _block(text: str) -> str:
    """As code, in a fence longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _inline(text: str) -> str:
    return " ".join(html.escape(text, quote=False).split())
