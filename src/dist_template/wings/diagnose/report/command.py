"""`report`: writes a page about runs: findings, curves, results, settings."""

import os
from pathlib import Path

from ....errors import InputError
from ....project import Flags, Project
from ...history import last_write, of_any_types
from ...store.hooks import local_copy
from ..command import newest
from .page import HTML, names_of, write
from .tables import tables


def main(argv: list[str], project: Project) -> None:
    """Writes report.html about the runs in `argv`, for `report` or `compare`. Raises InputError if
    one is not a run folder, the page cannot be written, or `compare` has one run."""
    verb, *flags = argv
    parser = Flags(verb, description=__doc__)
    runs = "runs/<name>/<id>, or a folder: its newest run"
    parser.add_argument("runs", nargs="+", type=Path, help=runs)
    where = "destination; default: the run's folder, or the folder that contains all runs"
    parser.add_argument("--output", type=Path, help=where)
    how = "where the page loads plotly.js from, see run.plotly; default: as in the first run"
    parser.add_argument("--plotly", choices=("shared", "inline", "cdn"), help=how)
    given = parser.parse_args(flags)
    runs = [_run(folder) for folder in given.runs]
    if verb == "compare" and len(runs) < 2:
        raise InputError(f"compare got one run, {runs[0]}; give two or more, or use `report`")
    if len({run.resolve() for run in runs}) < len(runs):
        raise InputError("a run is given twice; give each once")
    output = given.output
    if output is None:
        output = Path(os.path.commonpath([run.absolute() for run in runs]))
    try:
        with of_any_types(runs):
            histories, findings = write(runs, output, given.plotly)
    except OSError as error:
        raise InputError(
            f"the report cannot be written into {output}: {error}; give --output"
        ) from error
    if verb == "compare":
        for table in tables(histories, names_of(histories)):
            print(f"\n{table.as_text()}")
    for folder, found in zip(runs, findings, strict=True):
        print(f"{folder}: {found[0].line if found else 'no findings'}")
    print(f"written to {output / HTML}")


def _run(folder: Path) -> Path:
    """Returns a run's folder, which may lack its configuration; else the newest run below it."""
    copy = Path(local_copy(folder))
    if last_write(copy) is not None:
        return copy
    return newest(copy)


def compare(argv: list[str], project: Project) -> None:
    """`compare`: writes the page about two or more runs, and prints their differences."""
    main(argv, project)
