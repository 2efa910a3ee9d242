"""Prints the JSON that DeepSpeed would get from a configuration."""

from __future__ import annotations

import contextlib
import json
import sys

from dist_template import Project
from dist_template.cli.fit import WithoutTrainer
from dist_template.cli.limits.machine import Machine, Setup


def main(argv: list[str], project: Project) -> None:
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout
        cli = WithoutTrainer.of(argv, project)
        trainer = vars(cli.config_init.trainer)
        machine = Machine.described(trainer, default=1)
        setup = Setup(machine, trainer, cli.model, cli.datamodule, model_config=None, trains=True)
        config = trainer["strategy"].complete_config(setup)
    print(json.dumps(config, indent=2))
