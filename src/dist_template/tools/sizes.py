"""The parser of a tool's own flags, which are given beside those of fit."""

from __future__ import annotations

import argparse

from ..project import program


def parser(verb: str, what: str, epilog: str = "", sizes: bool = True) -> argparse.ArgumentParser:
    """Returns the parser of the flags of `verb`, with `sizes` also those of the real run's machine."""
    made = argparse.ArgumentParser(
        prog=program(verb),
        usage=f"{program(verb)} --config FILE [--config FILE]… [--KEY VALUE]… [flags below]",
        description=what,
        epilog=f"Every other key is fit's: see `{program('fit')} --help`.{epilog}",
        allow_abbrev=False,
    )
    if sizes:
        made.add_argument("--nodes", type=int, help="nodes of the real run (default: trainer.num_nodes)")
        made.add_argument("--devices", type=int, help="devices per node of the real run (default: trainer.devices)")
    return made


def as_flags(own: argparse.Namespace) -> list[str]:
    """Returns the sizes as flags of fit, to be given last: a later --config file would override them."""
    given = {"num_nodes": own.nodes, "devices": own.devices}
    return [f"--trainer.{key}={size}" for key, size in given.items() if size]
