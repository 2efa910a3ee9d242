"""Renders the report as Markdown, for a mail or an issue: without curves and folded texts."""

from __future__ import annotations

import html
import re
from typing import Any

from .page import FOLDER


def markdown(context: dict[str, Any]) -> str:
    """Returns the content of report.md from `page.context`."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(FOLDER), finalize=_inline, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["block"] = _block
    return environment.get_template("page.md").render(context)


def _inline(text: Any) -> Any:
    """Returns the text escaped on one line; blocks remain as they are."""
    if hasattr(text, "__html__"):
        return text
    return " ".join(html.escape(str(text), quote=False).replace("|", "\\|").split())


def _block(text: str) -> Any:
    """Returns the text as code, between fences that are longer than any in it."""
    from markupsafe import Markup

    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence}text\n{text}\n{fence}")
