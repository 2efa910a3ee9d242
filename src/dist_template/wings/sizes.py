"""The parser of a tool's own flags, among them the size of the real run's machine."""

import argparse

from ..project import Flags, program
from .ranges import in_range

COUNT = in_range(int, 1, 100_000)


def parser(verb: str, description: str, epilog: str = "") -> Flags:
    """Returns the parser of `verb`, with --nodes and --devices."""
    made = Flags(
        verb,
        usage=f"{program(verb)} --config FILE [--config FILE]… [--KEY VALUE]… [flags below]",
        description=description,
        epilog=f"Every other key is fit's: see `{program('fit')} --help`.{epilog}",
    )
    made.add_argument(
        "--nodes", type=COUNT, help="nodes of the real run (default: trainer.num_nodes)"
    )
    made.add_argument(
        "--devices", type=COUNT, help="devices per node of the real run (default: trainer.devices)"
    )
    return made


def as_flags(parsed: argparse.Namespace) -> list[str]:
    """Returns the sizes as flags of fit, to be given last: a later --config would override them."""
    given = {"num_nodes": parsed.nodes, "devices": parsed.devices}
    return [f"--trainer.{key}={size}" for key, size in given.items() if size]
