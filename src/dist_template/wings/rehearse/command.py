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

    from ...cli.fit import CLI
    from .report import Result
    from .runs import Runs

REAL_SIZES = "the real sizes fit together"
MIN_STEPS = 6  # the kill needs steps before and after it


def main(argv: list[str], project: Project, prelude: Callable[[], None] | None = None) -> None:
    """Checks the sizes of a configuration without running it, then trains it small.

    `prelude` is called in each process before anything else; tests inject faults with it.

    Raises:
        InputError: the configuration cannot be read or made small.
        SystemExit: with 1, if a check fails.
    """
    options, flags = rehearse_flags().parse_known_args(argv[1:])
    from . import source_order
    from .checks import CHECKS
    from .report import Report
    from .runs import RunFailed

    names = [REAL_SIZES, source_order.NAME, *(check.name for check in CHECKS)]
    if not any(options.only in name for name in names):
        raise InputError(f"--only {options.only!r} matches no check of: {', '.join(names)}")
    folder = Path(options.output or f"runs/rehearsals/{time.strftime('%Y%m%d-%H%M%S')}")
    if any(folder.glob("*")):
        raise InputError(f"--output {str(folder)!r} is not empty; give another folder")
    cli, config, runs = make_small(options, flags, folder, project, prelude)
    small = runs.small

    for note in small.notes:
        print(f"note: {note}")
    title = f"rehearsal of {' '.join(flags)} on {small.processes} processes"
    report = Report(title, {"processes": small.processes, "notes": small.notes})
    report.add(_check_real_sizes(cli, config))
    source = getattr(cli.datamodule, "source", None)
    if options.keep_data and source is not None and options.only in source_order.NAME:
        report.add(source_order.check(source))
    checks = [check for check in CHECKS if options.only in check.name]
    try:
        if checks:
            runs.prepare()
    except RunFailed as failure:
        raise InputError(failure.refusal or str(failure)) from failure
    for check in checks:
        report.add(check.run(runs))
    report.end(folder)
    if not report.ok:
        sys.exit(Exit.FAILED)


def rehearse_flags() -> argparse.ArgumentParser:
    """Returns the parser of the flags that are not keys of `fit`."""
    exit_codes = " Exit code: 0 all checks hold, 1 a check failed, 2 bad input."
    parser = sizes.parser("rehearse", str(__doc__), exit_codes)
    processes = "CPU processes (default: the minimum for the strategy)"
    parser.add_argument("--processes", type=in_range(int, 1, 1024), help=processes)
    steps = f"optimizer steps of each training, {MIN_STEPS} or more (default: {MIN_STEPS})"
    parser.add_argument("--steps", type=in_range(int, MIN_STEPS), default=MIN_STEPS, help=steps)
    output = "folder for the report and all runs (default: runs/rehearsals/<time>)"
    parser.add_argument("--output", help=output)
    keep = "read data.source with data.tokenizer instead of generated text"
    parser.add_argument("--keep_data", action="store_true", help=keep)
    only = "run only the checks with this in their name (default: all)"
    parser.add_argument("--only", default="", help=only)
    idle = "seconds without progress after which a training counts as hung (default: 60)"
    parser.add_argument("--timeout", type=in_range(float, 0.001), default=60, help=idle)
    return parser


def make_small(
    options: argparse.Namespace,
    flags: list[str],
    folder: Path,
    project: Project,
    prelude: Callable[[], None] | None = None,
) -> tuple[CLI, PretrainedConfig | None, Runs]:
    """Returns the configuration's objects, the full-size model's configuration, and the trainings.

    Raises InputError if the configuration cannot be read or made small.
    """
    import yaml

    from ...cli.fit import WithoutTrainer
    from .runs import Runs
    from .shrink_config import shrink

    class Resolved(WithoutTrainer):
        def before_instantiate_classes(self) -> None:
            self.config.trainer.logger = False
            self.resolved = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))
            super().before_instantiate_classes()

    os.environ.pop(Variable.RUN_ID, None)
    cli = Resolved(project, [*flags, *sizes.as_flags(options)], run=False)
    config = model_config(cli)
    how = (options.steps, options.processes, options.keep_data)
    small = shrink(cli.resolved, config, folder, *how)
    return cli, config, Runs(small, folder, project, prelude, options.timeout)


def model_config(cli: CLI) -> PretrainedConfig | None:
    """Returns the transformers configuration at full size; None for another kind of model."""
    data, build = cli.datamodule, getattr(cli.model, "build_config", None)
    if build is None or not hasattr(data, "seq_len"):
        return None
    tokenizer = getattr(data, "tokenizer", None)
    vocab_size = getattr(tokenizer, "vocab_size", 2**15)  # unknown before `prepare`
    return build(SimpleNamespace(vocab_size=vocab_size, eos_token_id=0, seq_len=data.seq_len))


def _check_real_sizes(cli: CLI, model_config: PretrainedConfig | None) -> Result:
    """Checks which settings cannot work together on the real machine."""
    from ...cli.limits import Machine, violations
    from .report import Result

    started = time.perf_counter()
    trainer, expected = vars(cli.config_init.trainer), "no violation"
    try:
        machine = Machine.described(trainer)
    except InputError as error:
        where = f"{error}; or give --devices, and --nodes, of the machine that has it"
        return Result(REAL_SIZES, expected, "not checked", "limit", where)
    asynchronous = cli.config_init.last_checkpoint.asynchronous
    setup = (machine, trainer, cli.model, cli.datamodule, model_config)
    cause = "; ".join(violations(*setup, saves_asynchronously=asynchronous))
    seconds = time.perf_counter() - started
    if cause:
        return Result(REAL_SIZES, expected, "as listed below", "FAIL", "", seconds, cause)
    return Result(REAL_SIZES, expected, f"{machine.world_size} ranks", "pass", "", seconds)
