"""`compare`: two or more runs side by side: what differs in their configuration, and what came out of each."""

from __future__ import annotations

import argparse

from ..errors import InputError
from ..project import Project, program
from .report import add_arguments, make


def main(argv: list[str], project: Project) -> None:
    """Print what differs, and write it with the curves over each other.

    Raises:
        InputError: there are not two runs, or one is no run's folder.
    """
    parser = argparse.ArgumentParser(prog=program("compare"), description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    arguments = parser.parse_args(argv[1:])
    if len(arguments.runs) < 2:
        raise InputError(f"compare got one run, {arguments.runs[0]}; give two or more, or use `report`")
    from ..observe.report.files import names_of
    from ..observe.report.sections import of_several
    from ..observe.report.tables import Table

    histories, _, page = make(arguments.runs, arguments.output, arguments.plotly)
    for section in of_several(histories, names_of(histories)):
        print(f"\n{section.title}")
        print("\n\n".join(part.as_text() for part in section.parts if isinstance(part, Table)))
    print(f"\ncurves are in {page}")
