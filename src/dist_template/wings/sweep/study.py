"""A sweep's trials: optuna's, in a journal that processes share, and `fit` in processes of its own.

A callback ends the trials that are worse than others at the same step."""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from lightning import LightningModule, Trainer
from lightning.pytorch import Callback
from optuna import distributions, pruners
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from ...cluster.launch import Variable
from ...cluster.run_lock import RunLock
from ...cluster.signals import STOP, end_with_parent
from ...errors import Ended, Exit, InputError
from ...processes import from_all_ranks
from ...project import Project
from ..history import read_run
from ..values import shown

SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "BruteForceSampler"}
KILLS = 3  # after so many a trial has failed


class Sweep:
    """The sweep in `folder`: journal.log, and the run of each trial in trial-0000, trial-0001, …
    `definition`: space, flags of fit, sampler, pruner, metric; None: the journal's."""

    def __init__(self, folder: Path, definition: dict[str, Any] | None = None) -> None:
        warnings.filterwarnings("ignore", "BruteForceSampler is experimental")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, journal = folder, folder / "journal.log"
        self._turn = JournalFileOpenLock(str(folder / "next"))
        lock = JournalFileOpenLock(str(journal))
        lock.acquire()  # optuna writes under it
        try:
            # It would write behind an entry that a kill has cut, and then refuse the journal.
            if journal.exists() and not (content := journal.read_bytes()).endswith(b"\n"):
                os.truncate(journal, content.rfind(b"\n") + 1)
        finally:
            lock.release()
        backend = JournalFileBackend(str(journal), lock)
        self._storage = optuna.storages.JournalStorage(backend)
        if definition:
            study = optuna.create_study(
                storage=self._storage,
                study_name="",
                load_if_exists=True,
                direction="maximize" if definition["mode"] == "max" else "minimize",
            )
            if study.user_attrs.get("definition", definition) != definition:
                raise InputError(f"{folder} has trials of another space or flags; set --name")
            study.set_user_attr("definition", definition)
        study = optuna.load_study(storage=self._storage, study_name="")
        self.definition: dict[str, Any] = study.user_attrs["definition"]

    def study(self, sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
        """Returns optuna's study; its pruner counts optimizer steps."""
        first = max(1, self.definition["prune_after"])
        pruner = {
            "median": pruners.MedianPruner(n_warmup_steps=first),
            "hyperband": pruners.HyperbandPruner(first),
            "none": pruners.NopPruner(),
        }[self.definition["pruner"]]
        return optuna.load_study(
            storage=self._storage, study_name="", sampler=sampler, pruner=pruner
        )

    def trial(self, number: int) -> optuna.Trial:
        """Returns an unfinished trial to add to, in any process."""
        study = self._storage.get_study_id_from_name("")
        trial = self._storage.get_trial_id_from_study_id_trial_number(study, number)
        return optuna.Trial(self.study(), trial)

    def run(self, number: int) -> Path:
        return self.folder / f"trial-{number:04}"

    def claim(self, most: int) -> Iterator[int]:
        """Yields unfinished trials that have no process, then new ones up to `most` in all."""
        with RunLock() as lock:
            for number in range(len(self.study().trials)):
                is_taken = lock.take(self.run(number) / "worker") is not None
                if not is_taken and not self.study().trials[number].state.is_finished():
                    yield number
            while (new := self._new(lock, most)) is not None:
                yield new

    def _new(self, lock: RunLock, most: int) -> int | None:
        self._turn.acquire()  # one process at a time: a trial's number determines its values
        try:
            if (number := len(self.study().trials)) >= most:
                return None
            lock.take(self.run(number) / "worker")
            space = {key: distribution(entry) for key, entry in self.definition["space"].items()}
            sampler = getattr(optuna.samplers, SAMPLERS[self.definition["sampler"]])
            self.study(sampler(seed=number)).ask(space)
            return number
        finally:
            self._turn.release()


def distribution(entry: dict[str, list[Any]]) -> distributions.BaseDistribution:
    """Returns optuna's distribution of {kind: values}, an entry of the file of --space."""
    ((kind, values),) = entry.items()
    if kind == "choice":
        return distributions.CategoricalDistribution([*values])
    if kind == "int":
        return distributions.IntDistribution(*map(int, values), log=False)
    is_log = {"float": False, "log": True}[kind]
    return distributions.FloatDistribution(*map(float, values), log=is_log)


def flags_of(values: dict[str, object]) -> list[str]:
    return [f"--{key}={shown(value)}" for key, value in values.items()]


def run(sweep: Sweep, number: int, project: Project) -> None:
    """Trains a trial, from its checkpoint if it has one; raises Ended if it was stopped."""
    study, given, folder = sweep.study(), sweep.definition, sweep.run(number)
    values = flags_of(study.trials[number].params)
    print(f"trial {number}: {' '.join(values)}", flush=True)
    callback = {"class_path": f"{__name__}.Pruning", "init_args": {"run": "{run}"}}
    more = [f"--run.name={given['name']}", f"--trainer.callbacks+={shown(callback)}"]
    argv = [sys.executable, "-m", project.package, "fit", *given["flags"], *values, *more]
    code = start(argv, folder)
    if (stopped := Exit.of_all([code])) in (Exit.REQUEUE, Exit.INTERRUPTED):
        # a trial may be killed each time, if it needs more than the host's memory
        kills = study.trials[number].user_attrs.get("kills", 0) + (code != stopped)
        sweep.trial(number).set_user_attr("kills", kills)
        if kills < KILLS:
            raise Ended(stopped, f"trial {number} was stopped; the same command resumes the sweep")
    pruned = study.trials[number].user_attrs.get("pruned")
    state, value = TrialState.FAIL, None
    if code:
        lines = (folder / "output.txt").read_text("utf-8", "replace").strip().split("\n")
        errors = [line for line in lines if line.startswith("error: ")]
        end = f"failed with code {code}: {(errors or lines)[-1]}"
    elif pruned:
        state, end = TrialState.PRUNED, f"pruned at step {pruned}"
    elif len(found := read_run(folder).metrics[given["metric"]].finite()):
        state, value, end = TrialState.COMPLETE, found.last, f"{given['metric']} {found.last:.4f}"
    else:
        end = f"has no finite {given['metric']}"
    sweep.trial(number).set_user_attr("end", end)
    study.tell(number, value, state=state)
    print(f"trial {number}: {end}", flush=True)


def start(argv: list[str], folder: Path) -> int:
    """Runs a command without Slurm's variables and forwards SIGTERM and SIGUSR1 to it."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    variables[Variable.RUN_ID] = folder.name
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            argv, env=variables, stdout=output, stderr=output, preexec_fn=end_with_parent
        )
    for each in STOP:
        signal.signal(each, lambda number, frame: process.send_signal(number))
    return process.wait()


class Pruning(Callback):
    """Ends a trial, on all ranks after the same step, if it is worse there than other trials."""

    def __init__(self, run: str) -> None:
        self.run = Path(run)  # the trial's folder

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, stops = trainer.global_step, False
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if trainer.is_global_zero:
            sweep = Sweep(self.run.parent)
            trial = sweep.trial(int(self.run.name.removeprefix("trial-")))
            trial.report(float(trainer.callback_metrics[sweep.definition["metric"]]), step)
            if stops := trial.should_prune() and step < trainer.estimated_stepping_batches:
                trial.set_user_attr("pruned", step)
        trainer.should_stop = from_all_ranks(stops)[0] or trainer.should_stop
