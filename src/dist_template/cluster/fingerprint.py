"""Compares the environment of all ranks before the first collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from ..errors import Ended, Exit, InputError
from ..records import flatten
from ..table import Table
from .environment import comparable, digest
from .hang import rank_ranges
from .rendezvous import Rendezvous, before_first_collective
from .run_lock import RUN_LOCK
from .watchdog import START_TIMEOUT_S

NOTHING = "-"


class SameEnvironment(Callback):
    """Exits with code 78 on every rank if packages, Python, CUDA, NCCL, driver, GPUs, git commit
    and changes, configuration, data or environment variables differ between ranks.

    Args:
        ignore: What may differ: a key of the table, as `packages.numpy`, or a group of them, as
            `variables`.
    """

    def __init__(self, ignore: list[str] = []) -> None:  # noqa: B006  (it is never modified)
        self.ignore = ignore
        self.refusal: str | None = None  # why rank 0 may not start; all ranks then stop

    def begin(self, trainer: Any, run: Path, config: dict[str, Any], timeout_s: float) -> None:
        """Schedules the comparison for when all ranks are started, before the first collective.

        `run`, the run's folder, and `config` may differ between ranks that were started manually.
        `timeout_s` 0 is the default.
        """

        def act(rendezvous: Rendezvous) -> None:
            self.compare(rendezvous, own_facts(run, config, trainer.datamodule))

        before_first_collective(trainer, timeout_s or START_TIMEOUT_S, act)

    def lock(self, trainer: Any, run: Path, started_by_a_launcher: bool) -> None:
        """Locks the run's folder on rank 0. Other ranks learn of a refusal in the comparison.

        Raises:
            InputError: another launch holds the lock.
        """
        if trainer.is_global_zero and not trainer.fast_dev_run and (refusal := RUN_LOCK.take(run)):
            if not started_by_a_launcher or trainer.world_size == 1:
                raise InputError(refusal)
            self.refusal = refusal

    def compare(self, rendezvous: Rendezvous, own: dict[str, Any]) -> None:
        """Compares digests of all ranks, and gathers the values that differ. Collective.

        `own` has this rank's facts: group -> value, or group -> name -> value.

        Raises:
            InputError: on every rank, if rank 0 was refused the run's folder.
            Ended: on every rank, if they differ.
        """
        own = self._without_ignored(own)
        rendezvous.publish("digests", {group: digest(value) for group, value in own.items()})
        if rendezvous.rank == 0:
            refusal, digests = self.refusal, [] if self.refusal else rendezvous.gather("digests")
            groups = sorted(set().union(*digests))
            differ = []
            for group in groups:
                if len({of_rank.get(group) for of_rank in digests}) > 1:
                    differ.append(group)
            rendezvous.broadcast("outcome", [refusal, differ])
        else:
            refusal, differ = rendezvous.receive("outcome")
        if refusal:
            rendezvous.publish("received", True)
            if rendezvous.rank == 0:
                rendezvous.gather("received")  # the store may be in this process, which exits now
            raise InputError(refusal)
        if not differ:
            return
        rendezvous.publish("values", {group: own.get(group) for group in differ})
        if rendezvous.rank:
            sentence = f"rank {rendezvous.rank}: environments differ; rank 0 prints the table"
            raise Ended(Exit.MISMATCH, sentence)
        raise Ended(Exit.MISMATCH, table(rendezvous.gather("values")))

    def _without_ignored(self, facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        kept = {name: value for name, value in facts.items() if prefix + name not in self.ignore}
        for name, value in kept.items():
            if isinstance(value, dict) and not prefix:
                kept[name] = self._without_ignored(value, f"{name}.")
        return kept


def own_facts(run: Path, config: dict[str, Any], datamodule: Any) -> dict[str, Any]:
    """Returns what this rank runs. `datamodule` has opened its token cache."""
    leaves = {key: str(value).replace(str(run), "{run}") for key, value in flatten(config).items()}
    manifest = getattr(getattr(datamodule, "corpus", None), "manifest", None)
    data = flatten(manifest or {})
    return {**comparable(), "run_folder": str(run), "config": leaves, "data": data}


def table(values: list[dict[str, Any]]) -> str:
    """Returns a table of key, ranks and value, for the keys that differ in each rank's `values`."""
    rows = []
    for group in values[0]:
        of_ranks = [value[group] for value in values]
        columns = {group: of_ranks}
        if all(isinstance(value, dict) for value in of_ranks):
            names = sorted(set().union(*of_ranks))
            columns = {}
            for name in names:
                columns[f"{group}.{name}"] = [value.get(name, NOTHING) for value in of_ranks]
        for key, column in columns.items():
            ranks: dict[str, list[int]] = {}
            for rank, value in enumerate(column):
                ranks.setdefault(str(value), []).append(rank)
            if len(ranks) > 1:
                rows += [[key, rank_ranges(there), text] for text, there in ranks.items()]
    title = (
        "the ranks' environments differ; make them equal, or allow it:"
        " --same_environment.ignore '[KEY, …]'"
    )
    return Table(title, ["key", "ranks", "value"], rows).as_text()
