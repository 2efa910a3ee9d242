"""Renders the report as one HTML file with its style, its data and the script of the curves.

page.html is a Jinja template, which escapes all texts of a run (samples, names, messages).
plotly_js.py determines where the page loads plotly.js from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....observe.history.run import History
from ....project import program
from ..finding import LEVELS, Finding
from . import curves, evaluation
from .commands import resume
from .results import figures
from .sections import of_one, of_several, status, what

FOLDER = Path(__file__).parent
AXES = ("steps", "tokens", "hours")


def context(
    histories: list[History], names: list[str], findings: list[list[Finding]], link: str = ""
) -> dict[str, Any]:
    """Returns the variables of the templates: for the report of one run, or of several.

    Args:
        histories: Of the runs.
        names: Of the runs.
        findings: Of each run.
        link: The address of plotly.js. Empty: the page contains it.
    """
    from markupsafe import Markup

    is_one = len(histories) == 1
    shown, more = curves.figures(histories, names)
    axes = curves.axes(histories)
    if is_one:
        shown += evaluation.forest(evaluation.newest(histories[0].folder))
    folders = " ".join(str(history.folder) for history in histories)
    return {
        "title": names[0] if is_one else f"{len(histories)} runs compared",
        "css": Markup((FOLDER / "page.css").read_text("utf-8")),
        "script": Markup((FOLDER / "page.js").read_text("utf-8")),
        "data": Markup(_as_json({"figures": [f.plot for f in [*shown, *more]], "axes": axes})),
        "link": link,
        "library": Markup("" if link else _plotly_js()),
        "what": what(histories[0]),
        "runs": list(map(_run, histories, names, findings)),
        "figures": figures(histories[0]),
        "resume": resume(histories[0]),
        "sections": of_one(histories[0]) if is_one else of_several(histories, names),
        "shown": shown,
        "more": more,
        "axes": [axis for axis in AXES if all(axis in each for each in axes)],
        "colours": curves.COLOURS,
        "command": f"{program('report')} {folders}",
    }


def page(context: dict[str, Any]) -> str:
    """Returns the content of report.html from `context`."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True)
    return environment.get_template("page.html").render(context)


def _run(history: History, name: str, findings: list[Finding]) -> dict[str, Any]:
    """Returns a run's name, findings, and the sentences about it."""
    counted = []
    for level in LEVELS:
        if num := sum(finding.level == level for finding in findings):
            counted.append(f"{num} {level}{'s' * (num > 1 and level != 'info')}")
    return {
        "name": name,
        "findings": findings,
        "counted": ", ".join(counted),
        "status": status(history),
        "crashed": bool(history.crashes),
        "gaps": curves.not_finite(history),
    }


def _as_json(data: dict[str, Any]) -> str:
    """Returns JSON without "<": the text "</script>" would end its element."""
    return json.dumps(data).replace("<", "\\u003c")


def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
