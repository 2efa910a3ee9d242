"""Writes report.html and report.md."""

from __future__ import annotations

from pathlib import Path

from ....errors import require
from ....observe.history.run import History, PlotlyJs, read_run
from ....records import write_atomically
from ..engine import diagnose
from ..finding import Finding
from .markdown import markdown
from .page import context, page
from .plotly_js import link

HTML, MARKDOWN = "report.html", "report.md"


def write(
    folders: list[Path], output: Path, plotly: PlotlyJs | None = None
) -> tuple[list[History], list[list[Finding]]]:
    """Writes a report on the runs in `folders`, and returns the histories and findings.

    Args:
        folders: Of runs.
        output: The folder of the report; it is created if it does not exist.
        plotly: Where the page loads plotly.js from. None: `run.plotly` of the first run.

    Raises:
        InputError: One of `folders` is not the folder of a run, or plotly is not installed.
    """
    require("plotly", "the report")
    histories = [read_run(folder.absolute()) for folder in folders]
    findings = [diagnose(history) for history in histories]
    names = names_of(histories)
    output.mkdir(parents=True, exist_ok=True)
    address = link(plotly or histories[0].key("run.plotly", "shared"), histories[0], output)
    content = context(histories, names, findings, address)
    write_atomically(output / HTML, page(content))
    write_atomically(output / MARKDOWN, markdown(content))
    return histories, findings


def names_of(histories: list[History]) -> list[str]:
    """Returns <run.name>/<id> of each run, or the full paths if two are equal."""
    names = [history.name for history in histories]
    if len(set(names)) < len(names):
        names = [str(history.folder) for history in histories]
    return names
