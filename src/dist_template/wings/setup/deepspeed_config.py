"""`deepspeed-config`: prints the JSON that DeepSpeed would get, for another program."""

from __future__ import annotations

import contextlib
import json
import sys

from ...errors import InputError
from ...project import Project
from .. import sizes


def main(argv: list[str], project: Project) -> None:
    """Prints the resolved DeepSpeed configuration of `argv`; starts no process and reads no data.

    Raises:
        InputError: the strategy is not ZeroStrategy, or its file conflicts with other keys.
    """
    given, flags = sizes.parser("deepspeed-config", str(__doc__)).parse_known_args(argv[1:])
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout
        import torch

        from ...cli.fit import parse
        from ...cli.limits.machine import Machine, Setup

        cli = parse([argv[0], *flags, *sizes.as_flags(given)], project)
        trainer = vars(cli.config_init.trainer)
        machine = Machine.described(trainer, default=max(1, torch.accelerator.device_count()))
        if hasattr(cli.datamodule, "check"):
            cli.datamodule.check(machine.world_size)
        setup = Setup(machine, trainer, cli.model, cli.datamodule, model_config=None, trains=True)
        if not (complete := getattr(trainer["strategy"], "complete_config", None)):
            add = "add a file such as --config configs/strategy/zero2.yaml"
            raise InputError(f"trainer.strategy {trainer['strategy']!r} does not use DeepSpeed; {add}")
        config = complete(setup)
    print(json.dumps(config, indent=2))
