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
        from ...cli.limits.zero import settings_of
        from ...parallel.zero import ZeroStrategy

        cli = parse([argv[0], *flags, *sizes.as_flags(given)], project)
        trainer = vars(cli.config_init.trainer)
        strategy = trainer["strategy"]
        if not isinstance(strategy, ZeroStrategy):
            add = "add a file such as --config configs/strategy/zero2.yaml"
            raise InputError(f"trainer.strategy {strategy!r} does not use DeepSpeed; {add}")
        machine = Machine.described(trainer, default=max(1, torch.accelerator.device_count()))
        if hasattr(cli.datamodule, "check"):
            cli.datamodule.check(machine.world_size)
        setup = Setup(machine, trainer, cli.model, cli.datamodule, model_config=None, trains=True)
        config = strategy.complete_config(settings_of(setup))
    print(json.dumps(config, indent=2))
