"""Compares the environment of all ranks before the first collective.

1  Rank 0 locks the run's folder (`lock`).
2  When all ranks are connected, each sends a hash of its environment to rank 0 (`begin`).
3  If the hashes differ, one rank with each hash sends its environment, rank 0 prints a table of the
   differences, and all ranks exit. A refused lock ends all ranks in the same way."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

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
            `variables`."""

    def __init__(self, ignore: list[str] = []) -> None:  # noqa: B006  (it is never modified)
        self.ignore = ignore
        self.refusal: str | None = None  # why rank 0 may not start; all ranks then stop

    def begin(self, trainer: Trainer, run: Path, config: dict[str, Any], timeout_s: float) -> None:
        """Schedules the comparison for when all ranks are started, before the first collective.
        `run`, the run's folder, and `config` may differ between ranks that were started manually.
        `timeout_s` 0 is the default."""

        def compare(rendezvous: Rendezvous) -> None:
            keys = {}
            for key, value in flatten(config).items():
                keys[key] = str(value).replace(str(run), "{run}")
            cache = getattr(getattr(trainer, "datamodule", None), "corpus", None)  # of tokens
            manifest = getattr(cache, "manifest", None)
            facts = comparable() | {"run_folder": str(run), "config": keys}
            facts["data"] = flatten(manifest) if manifest else {}
            self.compare(rendezvous, facts)

        before_first_collective(trainer, timeout_s if timeout_s else START_TIMEOUT_S, compare)

    def lock(self, trainer: Any, run: Path, started_by_a_launcher: bool) -> None:
        """Locks the run's folder on rank 0. Other ranks learn of a refusal in the comparison."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        refusal = RUN_LOCK.take(run)
        if refusal and (not started_by_a_launcher or trainer.world_size == 1):
            raise InputError(refusal)
        self.refusal = refusal

    def compare(self, rendezvous: Rendezvous, facts: Mapping[str, object]) -> None:
        """Compares the facts of all ranks. Collective. `facts` are this rank's: group -> value, or
        group -> name -> value. Every rank raises InputError if rank 0 was refused the run's folder,
        and Ended if facts differ."""
        own = {}
        for key, value in flatten(facts).items():
            if key not in self.ignore and key.partition(".")[0] not in self.ignore:
                own[key] = str(value)
        digests: list[str] = []  # of all ranks, on rank 0

        def first_of_each(found: list[str]) -> tuple[str | None, list[int]]:
            digests.extend(found)
            return self.refusal, [found.index(each) for each in dict.fromkeys(found)]

        refusal, ranks = rendezvous.ask("digest", digest(sorted(own.items())), first_of_each)
        if refusal:
            rendezvous.leave()
            raise InputError(refusal)
        if len(ranks) == 1:
            return
        sentence = f"rank {rendezvous.rank}: environments differ; rank 0 prints the table"

        def compare(texts: list[dict[str, str]]) -> None:
            nonlocal sentence
            by_digest = dict(zip(dict.fromkeys(digests), texts, strict=True))
            sentence = table([by_digest[each] for each in digests])

        rendezvous.ask("facts", own, compare, ranks)
        rendezvous.leave()
        raise Ended(Exit.MISMATCH, sentence)


def table(columns: list[dict[str, str]]) -> str:
    """Returns a table of key, ranks and value, for the keys that differ in the ranks' `columns`."""
    rows = []
    for key in sorted(set().union(*columns)):
        ranks: dict[str, list[int]] = {}  # by value
        for rank, column in enumerate(columns):
            ranks.setdefault(column.get(key, NOTHING), []).append(rank)
        if len(ranks) > 1:
            for text, there in ranks.items():
                rows.append([key, rank_ranges(there), text])
    title = (
        "the ranks' environments differ; make them equal, or allow it: --same_environment.ignore"
        " '[KEY, …]'"
    )
    return Table(title, ["key", "ranks", "value"], rows).as_text()
