"""The parser of a tool's own flags, among them the size of the real run's machine."""

import argparse

from ..project import Flags, program
from .ranges import in_range

SIZES = (  # flag, key, what it is
    ("nodes", "num_nodes", "nodes"),
    ("devices", "devices", "devices per node"),
)
COUNT = in_range(int, 1, 100_000)


def parser(verb: str, description: str, epilog: str = "") -> Flags:
    """Returns the parser of `verb`, with --nodes and --devices."""
    made = Flags(
        verb,
        usage=f"{program(verb)} --config FILE [--config FILE]… [--KEY VALUE]… [flags below]",
        description=description,
        epilog=f"Every other key is fit's: see `{program('fit')} --help`.{epilog}",
    )
    for name, key, what in SIZES:
        help = f"{what} of the real run (default: trainer.{key})"
        made.add_argument(f"--{name}", type=COUNT, help=help)
    return made


def as_flags(parsed: argparse.Namespace) -> list[str]:
    """Returns the sizes as flags of fit, to be given last: a later --config would override them."""
    return [f"--trainer.{key}={size}" for name, key, _ in SIZES if (size := getattr(parsed, name))]
