"""`prepare`: tokenizes the data once, in one process, before training."""

from __future__ import annotations

from ..cli.fit import parse
from ..project import Project


def main(argv: list[str], project: Project) -> None:
    """Writes the token cache of a configuration and prints a summary; an existing one is checked.

    Raises:
        InputError: the data is missing, empty or unreadable, the disk is full, or another `prepare`
            runs.
    """
    data = parse(argv, project).datamodule
    getattr(data, "prepare", data.prepare_data)()  # Lightning's hook without a cache of tokens
