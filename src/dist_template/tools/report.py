"""`report`: a page about a run, or about several over each other, and its Markdown summary."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..errors import InputError
from ..observe.diagnosis.finding import Finding
from ..observe.history.run import History
from ..observe.report.plotly_js import PlotlyJs
from ..project import Project, program


def main(argv: list[str], project: Project) -> None:
    """Write report.html and report.md about the runs that `argv` names.

    Raises:
        InputError: one is no run's folder, or the page cannot be written.
    """
    parser = argparse.ArgumentParser(prog=program("report"), description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    arguments = parser.parse_args(argv[1:])
    _, findings, page = make(arguments.runs, arguments.output, arguments.plotly)
    for folder, found in zip(arguments.runs, findings, strict=True):
        print(f"{folder}: {found[0].line if found else 'no findings'}")
    print(f"written to {page} and {page.with_suffix('.md').name}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="a run's folder, runs/<name>/<id>")
    where = "where to write; default: the run's folder, of several runs the folder that all are in"
    parser.add_argument("--output", type=Path, help=where)
    how = "where the page loads plotly.js from, see run.plotly; default: as the first run has it"
    parser.add_argument("--plotly", choices=("shared", "inline", "cdn"), help=how)


def make(
    runs: list[Path], output: Path | None, plotly: PlotlyJs | None = None
) -> tuple[list[History], list[list[Finding]], Path]:
    """What was read and found, and the page that was written."""
    from ..observe.report.files import HTML, write

    if len({run.resolve() for run in runs}) < len(runs):
        raise InputError("a run is given twice; give each once")
    output = output or Path(os.path.commonpath([run.absolute() for run in runs]))
    try:
        histories, findings = write(runs, output, plotly)
    except OSError as error:
        raise InputError(f"the report cannot be written into {output}: {error}; give --output") from error
    return histories, findings, output / HTML
