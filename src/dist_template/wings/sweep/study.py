"""A sweep's trials, which are optuna's; processes share them by a journal in a file."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...cluster.run_lock import RunLock
from ...errors import InputError
from ...table import shown

SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "BruteForceSampler"}


class Sweep:
    """The sweep in `folder`: journal.log, and the run of each trial in trial-0000, trial-0001, …

    `definition`: space, flags of fit, sampler, pruner, metric; None: those of the journal.
    """

    def __init__(self, folder: Path, definition: dict[str, Any] | None = None) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        warnings.filterwarnings("ignore", "BruteForceSampler is experimental")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self._optuna, path = folder, optuna, str(folder / "journal.log")
        self._turn = JournalFileOpenLock(str(folder / "next"))
        lock = JournalFileOpenLock(path)
        _check_journal(Path(path), lock)
        backend = JournalFileBackend(path, lock)
        self._where: Any = {"storage": optuna.storages.JournalStorage(backend), "study_name": ""}
        if definition:
            options: Any = {"direction": f"{definition['mode']}imize", "load_if_exists": True}
            study = optuna.create_study(**self._where, **options)
            if study.user_attrs.get("definition", definition) != definition:
                raise InputError(f"{folder} has trials of another space or flags; set --name")
            study.set_user_attr("definition", definition)
        self.definition = optuna.load_study(**self._where).user_attrs["definition"]

    def study(self, sampler: Any = None) -> Any:
        """Returns optuna's study; its pruner counts optimizer steps."""
        pruners = self._optuna.pruners
        kind, first = self.definition["pruner"], max(1, self.definition["prune_after"])
        pruner = {"median": pruners.MedianPruner(n_warmup_steps=first), "none": pruners.NopPruner()}
        pruner["hyperband"] = pruners.HyperbandPruner(first)
        return self._optuna.load_study(**self._where, sampler=sampler, pruner=pruner[kind])

    def trial(self, number: int) -> Any:
        """Returns an unfinished trial to add to, in any process."""
        storage, name = self._where.values()
        of = storage.get_study_id_from_name(name)
        which = storage.get_trial_id_from_study_id_trial_number(of, number)
        return self._optuna.Trial(self.study(), which)

    def run(self, number: int) -> Path:
        return self.folder / f"trial-{number:04}"

    def claim(self, most: int) -> Iterator[int]:
        """Yields unfinished trials that have no process, then new ones up to `most` in all."""
        with (lock := RunLock()):
            for trial in [one for one in self.study().trials if not one.state.is_finished()]:
                is_free = lock.take(self.run(trial.number) / "worker") is None
                if not is_free or self.study().trials[trial.number].state.is_finished():
                    continue
                if self._has_values(trial):
                    yield trial.number
                else:
                    self.trial(trial.number).set_user_attr("end", "killed before it had values")
                    self.study().tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
            while (number := self._new(lock, most)) is not None:
                yield number

    def _has_values(self, trial: Any) -> bool:
        return trial.params.keys() == self.definition["space"].keys()

    def _new(self, lock: RunLock, most: int) -> int | None:
        self._turn.acquire()  # one process at a time: a trial's number determines its values
        try:
            number = len(trials := self.study().trials)
            if sum(map(self._has_values, trials)) >= most:
                return None
            lock.take(self.run(number) / "worker")
            space = {key: distribution(entry) for key, entry in self.definition["space"].items()}
            kind = getattr(self._optuna.samplers, SAMPLERS[self.definition["sampler"]])
            self.study(kind(seed=number)).ask(space)
            return number
        finally:
            self._turn.release()


def _check_journal(journal: Path, lock: Any) -> None:
    """Drops a damaged last entry, as a kill leaves it; raises InputError if it is an earlier one.

    optuna writes the next entry behind it, and then refuses the whole journal."""
    if not journal.exists():
        return
    lock.acquire()  # optuna writes under it
    try:
        lines = journal.read_bytes().splitlines(keepends=True)
        damaged = [number for number, line in enumerate(lines) if not _is_entry(line)]
        if damaged == [len(lines) - 1]:
            os.truncate(journal, sum(map(len, lines[:-1])))
    finally:
        lock.release()
    if damaged and damaged[0] < len(lines) - 1:
        cure = "restore the file, or set another --name"
        raise InputError(f"{journal}:{damaged[0] + 1} is damaged: it is no entry; {cure}")
    if damaged:
        print(f"{journal}: its last entry was cut by a kill and is dropped; it is done again")


def _is_entry(line: bytes) -> bool:
    try:  # codes of optuna 4
        return json.loads(line)["op_code"] in range(11) and line.endswith(b"\n")
    except (ValueError, KeyError, TypeError):
        return False


def distribution(entry: dict[str, list[Any]]) -> Any:
    """Returns optuna's distribution of {kind: values}, an entry of the file of --space."""
    from optuna import distributions as kinds

    ((kind, values),) = entry.items()
    if kind == "choice":
        return kinds.CategoricalDistribution([*values])
    if kind == "int":
        return kinds.IntDistribution(*map(int, values), log=False)
    return kinds.FloatDistribution(*map(float, values), log={"float": False, "log": True}[kind])


def flags_of(values: dict[str, Any]) -> list[str]:
    return [f"--{key}={shown(value)}" for key, value in values.items()]
