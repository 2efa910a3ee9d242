"""`deepspeed-config`: prints the JSON that DeepSpeed would get, for its launcher or for another program."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from ..errors import InputError
from ..project import Project
from . import sizes


def main(argv: list[str], project: Project) -> None:
    """Prints the resolved DeepSpeed configuration of `argv`; starts no process and reads no data.

    Raises:
        InputError: the strategy is not ZeroStrategy, or its file conflicts with the rest of the configuration.
    """
    own, flags = sizes.parser("deepspeed-config", str(__doc__)).parse_known_args(argv[1:])
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout, which must hold the JSON alone
        from ..cli.fit import parse

        config = _complete_config(parse([argv[0], *flags, *sizes.as_flags(own)], project))
    print(json.dumps(config, indent=2))


def _complete_config(cli: Any) -> dict[str, Any]:
    from ..compat.lightning import unified_precision
    from ..parallel.deepspeed_config import Settings, batch_sizes, hidden_size
    from ..parallel.zero import ZeroStrategy

    trainer, module, data = cli.config_init.trainer, cli.model, cli.datamodule
    if not isinstance(trainer.strategy, ZeroStrategy):
        raise InputError(
            f"trainer.strategy {trainer.strategy!r} does not use DeepSpeed; add a file such as "
            "--config configs/strategy/zero2.yaml"
        )
    processes = trainer.num_nodes * _number_of(trainer.devices)
    if hasattr(data, "check"):
        data.check(processes)
    return trainer.strategy.complete_config(
        Settings(
            accelerator="cpu" if trainer.accelerator == "cpu" else "cuda",  # auto: the machine of the real run
            precision=unified_precision(trainer.precision),
            gradient_clip_val=trainer.gradient_clip_val or 0.0,
            hidden_size=lambda: hidden_size(module),
            **batch_sizes(data, processes, trainer.accumulate_grad_batches or 1),
        )
    )


def _number_of(devices: Any) -> int:
    """Returns the number of devices per node that `trainer.devices` stands for."""
    import torch

    if isinstance(devices, list):
        return len(devices)
    if devices in ("auto", -1, "-1"):
        return max(1, torch.accelerator.device_count())
    return int(devices)
