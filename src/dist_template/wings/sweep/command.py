"""`sweep`: tries values of some keys in many trainings, and writes the best configuration.

First the space is checked: `fit` checks a configuration with each choice and with both ends of each
range. Then the trials run one after the other (study.py), and best.yaml gets the values of the best
one."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...cli.config_file import read as read_keys
from ...cli.fit import WithoutTrainer
from ...cli.limits import Machine, violations
from ...errors import Ended, Exit, InputError, reason, require
from ...project import Flags, Project, program
from ...records import write_atomically
from ..history import read_run
from ..ranges import in_range
from ..values import shown

if TYPE_CHECKING:
    from argparse import Namespace

    from .study import Sweep

SET_BY_SWEEP = ("trainer.callbacks", "best_checkpoint.monitor", "best_checkpoint.mode")
FORMS = "{float: [low, high]}, {log: [low, high]}, {int: [low, high]} or {choice: [a, b]}"


def main(argv: list[str], project: Project) -> None:
    """Runs the sweep of `argv`, or resumes it; raises Ended if it was stopped."""
    made = Flags("sweep", epilog="and fit's flags")
    made.add_argument("--space", required=True, help="YAML of keys of fit with their values")
    made.add_argument(
        "--trials", type=in_range(int, 1), default=16, help="trials, over all processes"
    )
    made.add_argument("--sampler", choices=("tpe", "random", "grid"), default="tpe")
    made.add_argument("--pruner", choices=("median", "hyperband", "none"), default="median")
    made.add_argument(
        "--prune_after", type=in_range(int, 0), default=0, help="optimizer steps of every trial"
    )
    made.add_argument("--name", help="name of the folder in run.root; default: <run.name>-<space>")
    given, flags = made.parse_known_args(argv[1:])
    if given.name is not None and not given.name.strip():
        raise InputError("--name is empty; give the name of the sweep's folder, or remove the flag")
    require("optuna", "sweep", extra="sweep")
    num_tasks = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1
    if int(num_tasks) > 1:
        raise InputError("sweep starts the processes of each trial: start it as one task")
    from .study import Sweep, run

    folder, definition = _checked(given, flags, project)
    sweep = Sweep(folder, definition)
    for number in sweep.claim(given.trials):
        run(sweep, number, project)
    _write_best(sweep)


def _checked(given: Namespace, flags: list[str], project: Project) -> tuple[Path, dict[str, Any]]:
    """Returns folder and definition; `fit` has checked every choice and the ends of every range."""
    from .study import flags_of

    where = f"--space {given.space}"
    space = read_keys(given.space, "--space")
    _check_space(space, where)
    ends: dict[str, Any] = {}  # key: its choices, or both ends of its range
    for key, entry in space.items():
        (ends[key],) = entry.values()
    if given.sampler == "grid":
        if any("choice" not in entry for entry in space.values()):
            raise InputError(f"{where}: a grid needs {{choice: [a, b]}} for each key")
        given.trials = min(given.trials, math.prod(map(len, ends.values())))
    # As many configurations as the longest list has values; a shorter list starts again.
    for number in range(max(map(len, ends.values()))):
        chosen = {key: values[number % len(values)] for key, values in ends.items()}
        tried = flags_of(chosen)
        cli = WithoutTrainer.of(["sweep", *flags, *tried], project)
        config, trainer = cli.config_init, vars(cli.config_init.trainer)
        best, machine = config.best_checkpoint, Machine.of(trainer)
        metric = best.monitor
        if not metric and getattr(cli.model, "counts_tokens", False):
            metric = "eval/loss"
        if not metric:
            raise InputError(
                "best_checkpoint.monitor is null, and a sweep compares trials by it: give the name"
                " of a validation metric"
            )
        refusals = violations(machine, trainer, cli.model, cli.datamodule)
        if refusals:
            raise InputError(f"{' '.join(tried)}: {refusals[0]}")
    definition = {key: vars(given)[key] for key in ("sampler", "pruner", "prune_after")}
    definition |= {"space": space, "flags": flags, "metric": metric, "mode": best.mode}
    definition["name"] = given.name or f"{config.run.name}-{Path(given.space).stem}"
    # refuses a wrong name
    WithoutTrainer.of(["sweep", *flags, f"--run.name={definition['name']}"], project)
    folder = Path(config.run.root) / definition["name"]
    folder.mkdir(parents=True, exist_ok=True)
    return folder, definition | {"of": config.run.name}


def _check_space(space: dict[str, Any], where: str) -> None:
    """Raises InputError if the space is empty, has a wrong entry, or a key of the sweep's own."""
    from .study import distribution

    if not space:
        raise InputError(f"{where} is empty; give keys of fit, each with one of {FORMS}")
    for key, entry in space.items():
        try:
            distribution(entry)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{where}: {key} is {shown(entry)} ({reason(error)}); give one of {FORMS}"
            ) from error
    for key in space:
        if str(key).startswith("run.") or key in SET_BY_SWEEP:
            raise InputError(
                f"{where}: {key} is set by the sweep, or compares its trials: remove it from the"
                " space; --name names the sweep"
            )


def _write_best(sweep: Sweep) -> None:
    """Writes best.yaml; raises Ended if no trial was completed."""
    from .study import flags_of

    study, folder = sweep.study(), sweep.folder
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        raise Ended(Exit.FAILED, f"no trial was completed; see {folder}/trial-*/output.txt")
    number = study.best_trial.number
    flags = shlex.join(flags_of(study.best_params))
    best = f"trial {number}: {sweep.definition['metric']} {study.best_value:.4f} with {flags}"
    start = f"{program('fit')} --config {shlex.quote(str(folder / 'best.yaml'))}"
    journal = shlex.quote(str(folder / "journal.log"))
    config = read_run(sweep.run(number).absolute()).config
    config["run"]["name"] = sweep.definition["of"]
    config["trainer"]["callbacks"].pop()  # Pruning, which is the last
    text = yaml.safe_dump(config, sort_keys=False)
    write_atomically(folder / "best.yaml", f"# {best}\n#   {start}\n{text}")
    print(f"best           {best}")
    print(f"train with it  {start}")
    print(f"all trials     optuna-dashboard {journal}")
