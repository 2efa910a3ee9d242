"""What a tool asks beside fit's keys: how large the real run is."""

from __future__ import annotations

import argparse

from ..project import program


def parser(verb: str, what: str, epilog: str = "") -> argparse.ArgumentParser:
    """Of `verb`'s own flags, which are taken out of the command before fit's keys are read."""
    made = argparse.ArgumentParser(
        prog=program(verb),
        usage=f"{program(verb)} --config FILE [--config FILE]… [--KEY VALUE]… [flags below]",
        description=what,
        epilog=f"Every other key is fit's: see `{program('fit')} --help`.{epilog}",
        allow_abbrev=False,
    )
    made.add_argument("--nodes", type=int, help="nodes of the real run (default: trainer.num_nodes)")
    made.add_argument("--devices", type=int, help="devices per node of the real run (default: trainer.devices)")
    return made


def as_flags(own: argparse.Namespace) -> list[str]:
    """The sizes as fit's flags; they come last, or a --config file would override them."""
    given = {"num_nodes": own.nodes, "devices": own.devices}
    return [f"--trainer.{key}={size}" for key, size in given.items() if size]
