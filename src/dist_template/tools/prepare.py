"""`prepare`: tokenize once, by one process, so that no rank ever tokenizes while others wait in a collective."""

from __future__ import annotations

from ..cli.fit import parse
from ..project import Project


def main(argv: list[str], project: Project) -> None:
    """Fill the token cache for `argv`'s configuration and print what is in it; quick when it is there already.

    Raises:
        InputError: the data is missing, empty or unreadable, the disk is full, or another `prepare` is at work.
    """
    parse(argv, project).datamodule.prepare()
