"""`config deepspeed`: writes the DeepSpeed JSON of a training, before it runs.

What a training under ZeroStrategy gives to DeepSpeed, from the same files and flags as `fit`. Such
a file is read by `fit --deepspeed FILE` and by Hugging Face's Trainer
(`TrainingArguments(deepspeed=FILE)`). DeepSpeed itself writes the JSON of a run into each
checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from ...errors import InputError, reason
from ...project import Project, program
from ...records import write_atomically
from .. import sizes

AUTO = "auto"
# What both this library and Hugging Face's Trainer fill in from other settings. The latter takes
# "auto" for these keys alone (transformers 5.23, integrations/deepspeed.py).
DECIDED_ELSEWHERE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
USAGE = """\nThe strategy is --config strategy/zero1, zero2 or zero3, its offload keys are
--trainer.strategy.offload_optimizer and .offload_parameters."""


def main(argv: list[str], project: Project) -> None:
    """Writes the JSON that `argv`, flags of fit and of this verb, describes. Starts no process and
    reads no data. Raises InputError if the strategy is not ZeroStrategy, the configuration cannot
    be trained, or the file cannot be written."""
    parser = sizes.parser("config deepspeed", str(__doc__), USAGE)
    parser.add_argument("--output", type=Path, help="the JSON file (default: standard output)")
    left = "write auto for batch sizes, clipping and the half precision, which the reader fills in"
    parser.add_argument("--auto", action="store_true", help=left)
    given, flags = parser.parse_known_args(argv)
    if given.output:
        _check_writable(given.output)
    # DeepSpeed's import logs to standard output
    with contextlib.redirect_stdout(sys.stderr):
        config = _resolved([*flags, *sizes.as_flags(given)], project)
    if given.auto:
        config = _with_auto(config)
    text = json.dumps(config, indent=2) + "\n"
    if not given.output:
        print(text, end="")
        return
    verb = "replaced" if given.output.exists() else "written"
    try:
        write_atomically(given.output, text)
    except OSError as error:
        raise InputError(f"--output {given.output} cannot be written: {reason(error)}") from error
    typed = shlex.quote(str(given.output))
    print(f"{verb}: {given.output}; {program('fit')} … --deepspeed {typed} reads it")


def _check_writable(output: Path) -> None:
    folder = output.absolute().parent
    if output.is_dir():
        raise InputError(f"--output {output} is a folder: give a file, as {output}/ds_config.json")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"--output {output}: {folder} is no folder that you can write to")


def _resolved(flags: list[str], project: Project) -> dict[str, Any]:
    """Returns the JSON that DeepSpeed gets, without "auto"."""
    import torch

    from ...cli.fit import WithoutTrainer
    from ...cli.limits import Machine, violations
    from ...parallel.configured import Configured
    from ...parallel.zero.json import json_of

    cli = WithoutTrainer.of(["config", *flags], project)
    trainer = {**cli.config_init.trainer}
    machine = Machine.described(trainer, default=max(1, torch.accelerator.device_count()))
    refused = violations(machine, trainer, cli.model, cli.datamodule)
    if refused:
        raise InputError(refused[0])
    if getattr(cli.datamodule, "global_batch_size", None) == AUTO:
        raise InputError(
            "data.global_batch_size auto is chosen by `fit`, and the JSON has a number: give one"
        )
    setup = Configured(machine, trainer, cli.model, cli.datamodule, model_config=None, trains=True)
    return json_of(trainer["strategy"], setup)


def _with_auto(config: dict[str, Any]) -> dict[str, Any]:
    decided: dict[str, Any] = dict.fromkeys(DECIDED_ELSEWHERE, AUTO)
    for section in ("bf16", "fp16"):
        # the reader switches on the one of its own precision
        decided[section] = {**config.get(section, {}), "enabled": AUTO}
    return config | decided
