"""The report as Markdown, for a mail, an issue or a terminal: without curves and what the page folds."""

from __future__ import annotations

import html
import re

from ...table import Table
from ..diagnosis.finding import Finding, as_text
from ..history.run import History
from .commands import resume
from .curves import not_finite
from .results import figures
from .sections import Section, of_one, of_several, status, what


def markdown(histories: list[History], names: list[str], findings: list[list[Finding]]) -> str:
    one = len(histories) == 1
    parts = [f"# {_inline(names[0])}", _inline(what(histories[0]))] if one else [f"# {len(histories)} runs compared"]
    for history, name, found in zip(histories, names, findings, strict=True):
        parts.append("## Verdict" if one else f"## {_inline(name)}")
        none = "" if found else "No findings: no rule found a problem. "
        parts.append(f"{none}The run {_inline(status(history))}.")
        parts += [as_text(found, markdown=True)] if found else []
        parts += [f"- {_inline(sentence)}" for sentence in not_finite(history)]
    if one:
        parts.append(Table("", ["", ""], [list(row) for row in figures(histories[0])]).as_markdown())
        sentence, command = resume(histories[0])
        parts += ["## Continue", f"{sentence}:", _block(command)] if command else []
    for section in of_one(histories[0]) if one else of_several(histories, names):
        parts += _section(section)
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    lines = []
    for part in section.parts:
        if isinstance(part, Table):
            lines.append(part.as_markdown() if part.rows else part.note)
        elif not part.folded:
            lines += [f"### {_inline(part.title)}", _block(part.body)]
    return [f"## {section.title}", *lines] if lines else []


def _block(text: str) -> str:
    """Returns the text as code, in a fence longer than any in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _inline(text: str) -> str:
    return " ".join(html.escape(text, quote=False).split())
