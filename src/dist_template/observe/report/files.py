"""report.html and report.md, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from ..diagnosis.engine import diagnose
from ..diagnosis.finding import Finding
from ..history.run import History, read_run
from .markdown import markdown
from .page import page
from .plotly_js import PlotlyJs, link

HTML, MARKDOWN = "report.html", "report.md"


def write(
    folders: list[Path], output: Path, plotly: PlotlyJs | None = None
) -> tuple[list[History], list[list[Finding]]]:
    """Write a report on the runs in `folders` into `output`; returns what was read and found.

    Args:
        folders: Of runs.
        output: A folder, which need not exist.
        plotly: Where the page loads plotly.js from. None: as `run.plotly` of the first run says.

    Raises:
        InputError: one is no run's folder.
    """
    histories = [read_run(folder.absolute()) for folder in folders]
    findings = [diagnose(history) for history in histories]
    names = names_of(histories)
    output.mkdir(parents=True, exist_ok=True)
    plotly = plotly or histories[0].key("run.plotly", "shared")
    for name, text in (
        (HTML, page(histories, names, findings, link(plotly, histories[0], output))),
        (MARKDOWN, markdown(histories, names, findings)),
    ):
        aside = output / f".{name}.tmp"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, output / name)
    return histories, findings


def names_of(histories: list[History]) -> list[str]:
    """<run.name>/<id>, and the whole path where that does not tell two apart."""
    names = [history.name for history in histories]
    return names if len(set(names)) == len(names) else [str(history.folder) for history in histories]
