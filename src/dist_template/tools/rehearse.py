"""`rehearse`: checks a production configuration on a few CPU processes, in minutes, before it uses GPU hours."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..cluster.launch import RUN_ID
from ..errors import Exit, InputError
from ..project import Project
from . import sizes

if TYPE_CHECKING:
    from ..rehearsal.report import Report
    from ..rehearsal.runs import Runs

REAL_SIZES = "the real sizes fit together"


def main(argv: list[str], project: Project, prelude: Callable[[], None] | None = None) -> None:
    """Checks the sizes of a configuration without running it, then trains it small; `prelude` is for tests.

    Raises:
        InputError: it cannot be read or made small.
        SystemExit: with 1, if a check fails.
    """
    own, flags = own_flags().parse_known_args(argv[1:])
    from ..rehearsal.checks import CHECKS
    from ..rehearsal.report import Report
    from ..rehearsal.runs import RunFailed

    names = [REAL_SIZES, *(check.name for check in CHECKS)]
    if not any(own.only in name for name in names):
        raise InputError(f"--only {own.only!r} matches no check; the checks are: {', '.join(names)}")
    folder = Path(own.output or f"runs/rehearsals/{time.strftime('%Y%m%d-%H%M%S')}")
    if any(folder.glob("*")):
        raise InputError(f"--output {str(folder)!r} is not empty; give another folder, or remove it")
    cli, model_config, runs = make_small(own, flags, folder, project, prelude)
    small = runs.small

    report = Report(
        f"rehearsal of {' '.join(flags)} on {small.processes} processes",
        {"processes": small.processes, "notes": small.notes},
    )
    print("\n".join(f"note: {note}" for note in small.notes), end="\n" if small.notes else "")
    report.begin()
    _check_real_sizes(report, cli, model_config)
    all_apply = own.keep_data or own.only
    checks = [check for check in CHECKS if own.only in check.name and (all_apply or not check.reads_source)]
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


def make_small(
    own: argparse.Namespace, flags: list[str], folder: Path, project: Project, prelude: Callable[[], None] | None = None
) -> tuple[Any, Any, Runs]:
    """Returns the configuration's objects, the model's full-size configuration, and the small trainings, not yet run.

    Raises:
        InputError: it cannot be read or made small.
    """
    from ..rehearsal.runs import Runs
    from ..rehearsal.shrink_config import shrink

    cli = _parse(flags, own, project)
    strategy, model_config = cli.config_init.trainer.strategy, _model_config(cli)
    small = shrink(cli.given, model_config, strategy, folder, own.steps, own.processes, own.keep_data)
    source = getattr(cli.datamodule, "source", None) if own.keep_data else None
    return cli, model_config, Runs(small, strategy, folder, project, prelude, own.timeout, source)


def own_flags() -> argparse.ArgumentParser:
    exit_codes = " Exit code: 0 all checks hold, 1 a check failed, 2 bad input."
    parser = sizes.parser("rehearse", str(__doc__), exit_codes)
    parser.add_argument("--processes", type=int, help="CPU processes (default: the minimum for the strategy)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each training, 6 or more (default: 6)")
    parser.add_argument("--output", help="folder for the report and all runs (default: runs/rehearsals/<time>)")
    keep = "read data.source with data.tokenizer instead of generated text"
    parser.add_argument("--keep_data", action="store_true", help=keep)
    parser.add_argument("--only", default="", help="run only the checks with this in their name (default: all)")
    idle = "seconds without progress after which a training counts as hung (default: 60)"
    parser.add_argument("--timeout", type=float, default=60, help=idle)
    return parser


def _parse(flags: list[str], own: argparse.Namespace, project: Project) -> Any:
    """Returns the parsed configuration, with `given`, its keys and values, and its objects."""
    import yaml

    from ..cli.fit import WithoutTrainer

    class Given(WithoutTrainer):
        def before_instantiate_classes(self) -> None:
            self.config.trainer.logger = False
            self.given = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))
            super().before_instantiate_classes()

    if own.steps < 6:
        raise InputError(f"--steps {own.steps} is below 6: the kill needs steps before and after it")
    os.environ.pop(RUN_ID, None)
    return Given(project, [*flags, *sizes.as_flags(own)], run=False)


def _model_config(cli: Any) -> Any:
    """Returns the transformers configuration at full size; None for another kind of model."""
    if not hasattr(cli.datamodule, "seq_len"):
        return None
    tokenizer = getattr(cli.datamodule, "tokenizer", None)
    vocab_size = getattr(tokenizer, "vocab_size", 2**15)  # the vocabulary is unknown before `prepare`
    data = SimpleNamespace(vocab_size=vocab_size, eos_token_id=0, seq_len=cli.datamodule.seq_len)
    build = getattr(cli.model, "build_config", None)
    return build(data) if build else None


def _check_real_sizes(report: Report, cli: Any, model_config: Any) -> None:
    """Adds one result: which settings cannot work together on the real machine."""
    from ..cli.limits import violations
    from ..rehearsal.report import Result

    started = time.perf_counter()
    trainer = vars(cli.config_init.trainer)
    expected = "no violation"
    try:
        machine = _real_machine(trainer)
    except InputError as error:
        where = f"{error}; or give --devices, and --nodes, of the machine that has it"
        report.add(Result(REAL_SIZES, expected, "not checked", "limit", where))
        return
    asynchronous = cli.config_init.last_checkpoint.asynchronous
    found = violations(machine, trainer, cli.model, cli.datamodule, model_config, saves_asynchronously=asynchronous)
    got, verdict = ("as listed below", "FAIL") if found else (f"{machine.world_size} ranks", "pass")
    report.add(Result(REAL_SIZES, expected, got, verdict, "", time.perf_counter() - started, "; ".join(found)))


def _real_machine(trainer: dict[str, Any]) -> Any:
    """Returns the machine of the real run: as configured, or this machine where the devices are `auto`.

    Raises:
        InputError: this machine lacks the devices, and no numbers are given.
    """
    from ..cli.limits import Machine

    if not str(trainer["devices"]).isdigit():
        return Machine.of(trainer)
    accelerator = {"gpu": "cuda", "auto": "cuda"}.get(trainer["accelerator"], trainer["accelerator"])
    return Machine(accelerator, int(trainer["devices"]), trainer["num_nodes"], str(trainer["precision"] or "32-true"))
