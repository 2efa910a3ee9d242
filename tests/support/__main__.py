"""`python -m tests.support VERB …`: the plain classifier's command line, for verbs that start
processes of their own."""

import sys

from dist_template.cli import main as command_line
from tests.support.classifier import PLAIN

if __name__ == "__main__":
    raise SystemExit(command_line.command(sys.argv[1:], PLAIN))
