"""A sweep's trials: optuna's, in a journal that processes share, and `fit` in processes of its own.

`Sweep` opens the journal, and `claim` takes one trial after the other: unfinished ones first, then
new ones, whose values optuna chooses. `run` trains a trial by `fit` and reports its metric to
optuna. Meanwhile the callback `Pruning` ends a trial that is worse than others at the same step."""

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
        self.folder = folder
        journal = folder / "journal.log"
        self._turn = JournalFileOpenLock(str(folder / "next"))
        lock = JournalFileOpenLock(str(journal))
        lock.acquire()  # optuna writes under it
        try:
            if journal.exists():
                _remove_incomplete_line(journal)
        finally:
            lock.release()
        backend = JournalFileBackend(str(journal), lock)
        self._storage = optuna.storages.JournalStorage(backend)
        if definition:
            direction = "maximize" if definition["mode"] == "max" else "minimize"
            study = optuna.create_study(
                storage=self._storage, study_name="", load_if_exists=True, direction=direction
            )
            if study.user_attrs.get("definition", definition) != definition:
                raise InputError(f"{folder} has trials of another space or flags; set --name")
            study.set_user_attr("definition", definition)
        study = optuna.load_study(storage=self._storage, study_name="")
        self.definition: dict[str, Any] = study.user_attrs["definition"]

    def study(self, sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
        """Returns optuna's study; its pruner counts optimizer steps."""
        first_step = max(1, self.definition["prune_after"])
        name = self.definition["pruner"]
        pruner: pruners.BasePruner = pruners.NopPruner()
        if name == "median":
            pruner = pruners.MedianPruner(n_warmup_steps=first_step)
        elif name == "hyperband":
            pruner = pruners.HyperbandPruner(first_step)
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
            new = self._new(lock, most)
            while new is not None:
                yield new
                new = self._new(lock, most)

    def _new(self, lock: RunLock, most: int) -> int | None:
        """Creates the next trial; returns its number, or None if there are `most`."""
        self._turn.acquire()  # one process at a time: a trial's number determines its values
        try:
            number = len(self.study().trials)
            if number >= most:
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
        return distributions.CategoricalDistribution(list(values))
    if kind == "int":
        return distributions.IntDistribution(*map(int, values), log=False)
    is_log = {"float": False, "log": True}[kind]  # KeyError: no such kind
    return distributions.FloatDistribution(*map(float, values), log=is_log)


def _remove_incomplete_line(journal: Path) -> None:
    """Removes an entry that a kill has cut: optuna would write behind it, and then refuse the
    journal."""
    content = journal.read_bytes()
    if not content.endswith(b"\n"):
        os.truncate(journal, content.rfind(b"\n") + 1)


def flags_of(values: dict[str, object]) -> list[str]:
    return [f"--{key}={shown(value)}" for key, value in values.items()]


def run(sweep: Sweep, number: int, project: Project) -> None:
    """Trains a trial, from its checkpoint if it has one; raises Ended if it was stopped."""
    study, definition, folder = sweep.study(), sweep.definition, sweep.run(number)
    values = flags_of(study.trials[number].params)
    print(f"trial {number}: {' '.join(values)}", flush=True)
    callback = {"class_path": f"{__name__}.Pruning", "init_args": {"run": "{run}"}}
    argv = [sys.executable, "-m", project.package, "fit", *definition["flags"], *values]
    argv.append(f"--run.name={definition['name']}")
    argv.append(f"--trainer.callbacks+={shown(callback)}")
    code = start(argv, folder)
    exit_code = Exit.of_all([code])
    if exit_code in (Exit.REQUEUE, Exit.INTERRUPTED):
        kills = study.trials[number].user_attrs.get("kills", 0)
        if code != exit_code:  # a signal has killed it
            kills += 1
        sweep.trial(number).set_user_attr("kills", kills)
        # A trial that needs more than the host's memory is killed each time.
        if kills < KILLS:
            raise Ended(
                exit_code, f"trial {number} was stopped; the same command resumes the sweep"
            )
    state, value, end = _result(sweep, number, code)
    sweep.trial(number).set_user_attr("end", end)
    study.tell(number, value, state=state)
    print(f"trial {number}: {end}", flush=True)


def _result(sweep: Sweep, number: int, code: int) -> tuple[TrialState, float | None, str]:
    """Returns how a trial has ended, whose process exited with `code`: for optuna its state and
    value, and in words."""
    folder, metric = sweep.run(number), sweep.definition["metric"]
    if code:
        lines = (folder / "output.txt").read_text("utf-8", "replace").strip().split("\n")
        errors = [line for line in lines if line.startswith("error: ")]
        last_line = errors[-1] if errors else lines[-1]
        return TrialState.FAIL, None, f"failed with code {code}: {last_line}"
    pruned = sweep.study().trials[number].user_attrs.get("pruned")
    if pruned:
        return TrialState.PRUNED, None, f"pruned at step {pruned}"
    series = read_run(folder).metrics[metric].finite()
    if not len(series):
        return TrialState.FAIL, None, f"has no finite {metric}"
    return TrialState.COMPLETE, series.last, f"{metric} {series.last:.4f}"


def start(argv: list[str], folder: Path) -> int:
    """Runs a command without Slurm's variables and forwards SIGTERM and SIGUSR1 to it."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    variables[Variable.RUN_ID] = folder.name
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            argv, env=variables, stdout=output, stderr=output, preexec_fn=end_with_parent
        )
    for stop_signal in STOP:
        signal.signal(stop_signal, lambda number, frame: process.send_signal(number))
    return process.wait()


class Pruning(Callback):
    """Ends a trial, on all ranks after the same step, if it is worse there than other trials."""

    def __init__(self, run: str) -> None:
        self.run = Path(run)  # the trial's folder

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        step, is_pruned = trainer.global_step, False
        if trainer.is_global_zero:
            sweep = Sweep(self.run.parent)
            trial = sweep.trial(int(self.run.name.removeprefix("trial-")))
            trial.report(float(trainer.callback_metrics[sweep.definition["metric"]]), step)
            if trial.should_prune() and step < trainer.estimated_stepping_batches:
                is_pruned = True
                trial.set_user_attr("pruned", step)
        if from_all_ranks(is_pruned)[0]:  # rank 0 decides
            trainer.should_stop = True
