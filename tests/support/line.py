"""The linked project's command line; imports nothing that takes time."""

from dist_template import Project
from dist_template.cli import main as command_line

PACKAGE = "trainer_dev"
OURS = Project(PACKAGE)


def main(argv: list[str]) -> int:
    """A verb in this process; the exit code."""
    return command_line.run(argv, OURS)


def command(argv: list[str]) -> int:
    """The same, with a diagnosis in place of a traceback, as in a process of its own."""
    return command_line.command(argv, OURS)
