"""`rehearse`: checks a production configuration on a few CPU processes, in minutes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ...cluster.launch import Variable
from ...errors import Exit, InputError
from ...project import Project
from .. import sizes
from ..ranges import in_range

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ...cli.fit import WithoutTrainer
    from ...cli.limits import Machine
    from .checks import Check
    from .report import Result
    from .runs import Runs
    from .shrink_config import Small

REAL_SIZES = "the real sizes fit together"


def main(argv: list[str], project: Project, prelude: Callable[[], None] | None = None) -> None:
    """Checks the sizes of a configuration without running it, then trains it small. `prelude` is
    called in each process before anything else; tests inject faults with it. Raises InputError if
    the configuration cannot be read or made small, and SystemExit with 1 if a check fails."""
    options, flags = rehearse_flags().parse_known_args(argv[1:])
    # Here, because they import torch, and `--help` does without.
    from ...cli.limits import Machine
    from ...model.proof import remember
    from .checks import run_checks
    from .report import Report, Result
    from .runs import RunFailed

    every = all_checks(options.gpu)
    checks = [check for check in every if options.only in check.name]
    if not checks and options.only not in REAL_SIZES:
        names = ", ".join(check.name for check in every)
        raise InputError(f"--only {options.only!r} matches no check of: {REAL_SIZES}, {names}")
    folder = Path(options.output or f"runs/rehearsals/{time.strftime('%Y%m%d-%H%M%S')}")
    if any(folder.glob("*")):
        raise InputError(f"--output {str(folder)!r} is not empty; give another folder")
    cli, model_config, runs = make_small(options, flags, folder, project, prelude)

    for note in runs.small.notes:
        print(f"note: {note}")
    title = f"rehearsal of {' '.join(flags)} on {runs.small.processes} processes"
    report = Report(title)
    trainer, machine = vars(cli.config_init.trainer), None
    try:
        machine = Machine.described(trainer)
    except InputError as error:
        where = f"{error}; or give --devices, and --nodes, of the machine that has it"
        report.add(Result(REAL_SIZES, "no violation", "not checked", "limit", where))
    else:
        report.add(check_real_sizes(cli, machine, model_config, runs.small))
    try:
        if checks:
            runs.prepare()
    except RunFailed as failure:
        raise InputError(failure.refusal or str(failure)) from failure
    for result in run_checks(runs, checks):
        report.add(result)
    report.end(folder)
    if "gpu" in runs.known and runs.known["gpu"].ok:
        from .gpu.checks import waiting

        remember(project.folder, waits=list(waiting(runs)))  # `fit` and `diagnose` name them
    if not report.ok:
        sys.exit(Exit.FAILED)
    if machine and not options.only:  # the model is proven under the strategy: `fit` is silent
        strategy = trainer["strategy"]
        file = remember(project.folder, model_config, strategy, machine.world_size, cli.model)
        if file:
            print(f"{file} has it")


def check_real_sizes(
    cli: WithoutTrainer, machine: Machine, model_config: PretrainedConfig | None, small: Small
) -> Result:
    """Returns the result of the checks that `fit` makes on `machine`; `small` gets the number of
    micro-batches there."""
    from ...cli.limits import violations
    from ...parallel.spec import spec_of
    from .report import Result

    trainer, data = vars(cli.config_init.trainer), cli.datamodule
    num_ranks = spec_of(trainer["strategy"]).data_parallel(machine.world_size)
    rows = getattr(data, "micro_batch_size", None)
    if small.is_text and rows:
        small.micro_batches = max(1, data.batch_sizes[0] // rows // num_ranks)
    saves = cli.config_init.last_checkpoint.asynchronous
    setup = (machine, trainer, cli.model, data, model_config)
    cause = "; ".join(violations(*setup, saves_asynchronously=saves))
    verdict = "FAIL" if cause else "pass"
    return Result(REAL_SIZES, "no violation", f"{machine.world_size} ranks", verdict, cause=cause)


def all_checks(on_gpu: bool) -> tuple[Check, ...]:
    """Returns the checks; raises InputError where fake GPUs do not work."""
    from .checks import CHECKS
    from .gpu.checks import CHECKS as OF_GPU
    from .gpu.devices import build

    if not on_gpu:
        return CHECKS
    build()  # refuses before anything has run
    return CHECKS + OF_GPU


def rehearse_flags() -> argparse.ArgumentParser:
    """Returns the parser of the flags that are not keys of `fit`."""
    exit_codes = " Exit code: 0 all checks hold, 1 a check failed, 2 bad input."
    parser = sizes.parser("rehearse", str(__doc__), exit_codes)
    processes = "CPU processes (default: the minimum for the strategy)"
    parser.add_argument("--processes", type=in_range(int, 1, 1024), help=processes)
    parser.add_argument(
        "--output", help="folder for the report and all runs (default: runs/rehearsals/<time>)"
    )
    gpu = "also check it on fake GPUs, which compute on this machine; needs g++, once"
    parser.add_argument("--gpu", action="store_true", help=gpu)
    keep = "read data.source with data.tokenizer instead of generated text"
    parser.add_argument("--keep_data", action="store_true", help=keep)
    parser.add_argument(
        "--only", default="", help="run only the checks with this in their name (default: all)"
    )
    return parser


def make_small(
    options: argparse.Namespace,
    flags: list[str],
    folder: Path,
    project: Project,
    prelude: Callable[[], None] | None = None,
) -> tuple[WithoutTrainer, PretrainedConfig | None, Runs]:
    """Returns the configuration's objects, the full-size model's configuration, and the trainings.
    Raises InputError if the configuration cannot be read or made small."""
    import yaml

    from ...cli.fit import WithoutTrainer
    from .runs import Runs
    from .shrink_config import shrink

    class Resolved(WithoutTrainer):
        def before_instantiate_classes(self) -> None:
            self.config.trainer.logger = False
            self.resolved = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))
            super().before_instantiate_classes()

    os.environ.pop(Variable.RUN_ID, None)  # of a job around it; each training has its own
    cli = Resolved.of(["rehearse", *flags, *sizes.as_flags(options)], project)
    config = model_config(cli)
    small = shrink(
        cli.resolved,
        config,
        folder,
        processes=options.processes,
        keep_data=options.keep_data,
        module=cli.model,
        data=cli.datamodule,
    )
    return cli, config, Runs(small, folder.absolute(), project, prelude)


def model_config(cli: WithoutTrainer) -> PretrainedConfig | None:
    """Returns the transformers configuration at full size; None for another kind of model."""
    data, build = cli.datamodule, getattr(cli.model, "build_config", None)
    if build is None or not hasattr(data, "seq_len"):
        return None
    tokenizer = getattr(data, "tokenizer", None)
    vocab_size = getattr(tokenizer, "vocab_size", 2**15)  # unknown before `prepare`
    return build(SimpleNamespace(vocab_size=vocab_size, eos_token_id=0, seq_len=data.seq_len))
