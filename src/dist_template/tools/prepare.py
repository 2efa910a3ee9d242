"""`prepare`: tokenizes the data once, in one process, before training: other ranks would wait in a collective."""

from __future__ import annotations

from ..cli.fit import parse
from ..project import Project


def main(argv: list[str], project: Project) -> None:
    """Writes the token cache of a configuration and prints a summary; an existing cache is checked only.

    Raises:
        InputError: the data is missing, empty or unreadable, the disk is full, or another `prepare` is at work.
    """
    data = parse(argv, project).datamodule
    getattr(data, "prepare", data.prepare_data)()  # Lightning's hook, where there is no cache of tokens
