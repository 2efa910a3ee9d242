"""A trial of a sweep: `fit` in processes of its own, with a callback that may prune it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from ... import weights
from ...cluster import signals, subprocess_launcher
from ...cluster.launch import RUN_ID
from ...errors import Ended, Exit
from ...observe.history.metrics import read_metrics
from ...project import Project
from ...table import shown
from .study import Sweep, flags_of

KILLS = 3  # after so many a trial has failed


def run(sweep: Sweep, number: int, project: Project) -> None:
    """Trains a trial, from its checkpoint if it has one; raises Ended if it was stopped."""
    from optuna.trial import TrialState

    study, given, folder = sweep.study(), sweep.definition, sweep.run(number)
    values = flags_of(study.trials[number].params)
    print(f"trial {number}: {' '.join(values)}", flush=True)
    callback = {"class_path": f"{__name__}.Pruning", "init_args": {"run": "{run}"}}
    own = [*values, f"--run.name={given['name']}", f"--trainer.callbacks+={shown(callback)}"]
    code = start([sys.executable, "-m", project.package, "fit", *given["flags"], *own], folder)
    if (stopped := Exit.of_all([code])) in (Exit.REQUEUE, Exit.INTERRUPTED):
        # a trial may be killed each time, if it needs more than the host's memory
        kills = study.trials[number].user_attrs.get("kills", 0) + (code != stopped)
        sweep.trial(number).set_user_attr("kills", kills)
        if kills < KILLS:
            raise Ended(stopped, f"trial {number} was stopped; the same command resumes the sweep")
    lines = (folder / "output.txt").read_text("utf-8", "replace").strip().split("\n")
    reason = ([line for line in lines if line.startswith("error: ")] or lines)[-1]
    state, end = TrialState.FAIL, f"failed with code {code}: {reason}"
    found = read_metrics(folder)[given["metric"]].finite()
    if not code and len(found):
        state, end = TrialState.COMPLETE, f"{given['metric']} {found.last:.4f}"
    if not code and (step := study.trials[number].user_attrs.get("pruned")):
        state, end = TrialState.PRUNED, f"pruned at step {step}"
    sweep.trial(number).set_user_attr("end", end)
    study.tell(number, found.last if state == TrialState.COMPLETE else None, state=state)
    print(f"trial {number}: {end}", flush=True)


def start(argv: list[str], folder: Path) -> int:
    """Runs a command, which is no rank of Slurm's, and passes SIGTERM and SIGUSR1 on to it."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    variables[RUN_ID] = folder.name
    with (folder / "output.txt").open("a") as output:
        process = subprocess_launcher.start(argv, env=variables, stdout=output, stderr=output)
    for each in signals.STOP:
        signal.signal(each, lambda number, frame: process.send_signal(number))
    return process.wait()


class Pruning(Callback):
    """Ends a trial, on all ranks after the same step, if it is worse there than other trials.

    Args:
        run: The trial's folder.
    """

    def __init__(self, run: str) -> None:
        self.run = Path(run)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        step, stops = trainer.global_step, False
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if trainer.is_global_zero:
            sweep = Sweep(self.run.parent)
            trial = sweep.trial(int(self.run.name.removeprefix("trial-")))
            trial.report(float(trainer.callback_metrics[sweep.definition["metric"]]), step)
            if stops := trial.should_prune() and step < trainer.estimated_stepping_batches:
                trial.set_user_attr("pruned", step)
        trainer.should_stop = weights.broadcast(stops) or trainer.should_stop
