"""Compares the environment of all ranks before the first collective, and prints one table of the differences."""

from __future__ import annotations

from functools import partial
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
    """Exits with code 78 on every rank if packages, Python, CUDA, NCCL, driver, GPUs, git commit and changes,
    configuration, data or environment variables differ between ranks.

    Args:
        ignore: What may differ: a key of the table, as `packages.numpy`, or a group of them, as `variables`.
    """

    def __init__(self, ignore: list[str] = []) -> None:  # noqa: B006  (it is never modified)
        self.ignore = ignore
        self.refusal: str | None = None  # why rank 0 may not start; all ranks then stop

    def begin(self, trainer: Any, run: Path, config: dict[str, Any], timeout_s: float) -> None:
        """Schedules the comparison for when all ranks are started.

        Args:
            trainer: Its first collective comes after the comparison.
            run: The run's folder; ranks that were started manually may have chosen different ones.
            config: The resolved configuration, of plain types.
            timeout_s: Seconds to wait for all ranks. 0: the default.
        """
        act = partial(self._act, trainer, run, config)
        before_first_collective(trainer, timeout_s or START_TIMEOUT_S, act)

    def lock(self, trainer: Any, run: Path, started_by_a_launcher: bool) -> None:
        """Locks the run's folder on rank 0. If other ranks are started, they learn of a refusal in the comparison.

        Raises:
            InputError: another launch holds the lock.
        """
        if trainer.is_global_zero and not trainer.fast_dev_run and (refusal := RUN_LOCK.take(run)):
            if not started_by_a_launcher or trainer.world_size == 1:
                raise InputError(refusal)
            self.refusal = refusal

    def _act(self, trainer: Any, run: Path, config: dict[str, Any], rendezvous: Rendezvous) -> None:
        self.compare(rendezvous, own_facts(run, config, trainer.datamodule))

    def compare(self, rendezvous: Rendezvous, own: dict[str, Any]) -> None:
        """Compares digests of all ranks, then gathers the values of what differs. Collective, through the store.

        Args:
            rendezvous: Of all ranks.
            own: This rank's facts: group -> value, or group -> name -> value.

        Raises:
            InputError: on every rank, if rank 0 was refused the run's folder.
            Ended: on every rank, if they differ.
        """
        own = self._without_ignored(own)
        rendezvous.publish("digests", {group: digest(value) for group, value in own.items()})
        if rendezvous.rank == 0:
            refusal, digests = self.refusal, [] if self.refusal else rendezvous.gather("digests")
            groups = sorted(set().union(*digests))
            differ = [group for group in groups if len({of_rank.get(group) for of_rank in digests}) > 1]
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
            raise Ended(Exit.MISMATCH, f"rank {rendezvous.rank}: environments differ; rank 0 prints the table")
        raise Ended(Exit.MISMATCH, table(rendezvous.gather("values")))

    def _without_ignored(self, facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        kept = {name: value for name, value in facts.items() if prefix + name not in self.ignore}
        if prefix:
            return kept
        return {g: self._without_ignored(v, f"{g}.") if isinstance(v, dict) else v for g, v in kept.items()}


def own_facts(run: Path, config: dict[str, Any], datamodule: Any) -> dict[str, Any]:
    """Returns what this rank runs. `datamodule` has opened its token cache."""
    leaves = {key: str(value).replace(str(run), "{run}") for key, value in flatten(config).items()}
    manifest = getattr(getattr(datamodule, "corpus", None), "manifest", None)
    return {**comparable(), "run_folder": str(run), "config": leaves, "data": flatten(manifest or {})}


def table(values: list[dict[str, Any]]) -> str:
    """Returns a table of key, ranks and value, for the keys that differ.

    Args:
        values: Each rank's: group -> value, or group -> name -> value.
    """
    rows = []
    for group in values[0]:
        of_ranks = [value[group] for value in values]
        columns = {group: of_ranks}
        if all(isinstance(value, dict) for value in of_ranks):
            names = sorted(set().union(*of_ranks))
            columns = {f"{group}.{name}": [value.get(name, NOTHING) for value in of_ranks] for name in names}
        for key, column in columns.items():
            ranks: dict[str, list[int]] = {}
            for rank, value in enumerate(column):
                ranks.setdefault(str(value), []).append(rank)
            if len(ranks) > 1:
                rows += [[key, rank_ranges(there), text] for text, there in ranks.items()]
    title = "the ranks' environments differ; make them equal, or allow it: --same_environment.ignore '[KEY, …]'"
    return Table(title, ["key", "ranks", "value"], rows).as_text()
