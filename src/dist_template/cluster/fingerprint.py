"""All ranks run the same: compared before the first collective, and told in one table where they do not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from ..errors import Ended, Exit, InputError
from .environment import comparable, digest
from .hang import rank_ranges
from .rendezvous import Rendezvous, before_first_collective
from .run_lock import RUN_LOCK
from .watchdog import START_TIMEOUT_S

NOTHING = "-"
WIDTH = 60  # characters of a value in the table


class SameEnvironment(Callback):
    """End with exit code 78, on every rank, where packages, Python, CUDA, NCCL, driver, GPUs, git commit and changes,
    configuration, data or environment variables differ between ranks.

    Args:
        ignore: What may differ: a key of the table, as `packages.numpy`, or a group of them, as `variables`.
    """

    def __init__(self, ignore: list[str] = []) -> None:  # noqa: B006  (nothing changes it)
        self.ignore = ignore
        self.refusal: str | None = None  # why rank 0 may not start, for all ranks

    def begin(self, trainer: Any, run: Path, config: dict[str, Any], timeout_s: float) -> None:
        """Compare when all ranks have been started, and wait `timeout_s` for them; 0: as long as by default.

        Args:
            trainer: Whose first collective it is to precede.
            run: The run's folder, which ranks started by hand may each have chosen for themselves.
            config: Every key resolved, of plain types.
            timeout_s: In seconds.
        """
        act = partial(self._act, trainer, run, config)
        before_first_collective(trainer, timeout_s or START_TIMEOUT_S, act)

    def lock(self, trainer: Any, run: Path, started_by_a_launcher: bool) -> None:
        """Take the run's folder, on rank 0; where other ranks have been started, they are told when all compare.

        Raises:
            InputError: another launch has it.
        """
        if trainer.is_global_zero and not trainer.fast_dev_run and (refusal := RUN_LOCK.take(run)):
            if not started_by_a_launcher or trainer.world_size == 1:
                raise InputError(refusal)
            self.refusal = refusal

    def _act(self, trainer: Any, run: Path, config: dict[str, Any], meeting: Rendezvous) -> None:
        self.compare(meeting, own_facts(run, config, trainer.datamodule))

    def compare(self, meeting: Rendezvous, own: dict[str, Any]) -> None:
        """Collective, through the store: digests first, and the values of what differs.

        Args:
            meeting: Of all ranks.
            own: What this rank has: group -> value, or -> name -> value.

        Raises:
            InputError: on every rank, when rank 0 is refused.
            Ended: on every rank, when they differ.
        """
        own = {group: self._without_ignored(group, value) for group, value in own.items() if group not in self.ignore}
        meeting.put("digests", {group: digest(value) for group, value in own.items()})
        if meeting.rank == 0 and self.refusal:
            meeting.announce("differ", differ := self.refusal)
        elif meeting.rank == 0:
            all_digests = meeting.get("digests")
            groups = sorted({group for digests in all_digests for group in digests})
            differ = [g for g in groups if len({digests.get(g) for digests in all_digests}) > 1]
            meeting.announce("differ", differ)
        else:
            differ = meeting.hear("differ")
        if not differ:
            return
        if isinstance(differ, str):
            meeting.put("heard", True)
            if meeting.rank == 0:
                meeting.get("heard")  # the store may end with this process
            raise InputError(differ)
        meeting.put("values", {group: own.get(group) for group in differ})
        if meeting.rank:
            raise Ended(Exit.MISMATCH, f"rank {meeting.rank} runs something else than other ranks; rank 0 tells what")
        raise Ended(Exit.MISMATCH, table(meeting.get("values")))

    def _without_ignored(self, group: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if f"{group}.{name}" not in self.ignore}


def own_facts(run: Path, config: dict[str, Any], datamodule: Any) -> dict[str, Any]:
    """What this rank runs; `datamodule` has opened its cache of tokens."""
    leaves = {key: str(value).replace(str(run), "{run}") for key, value in flat(config).items()}
    manifest = getattr(getattr(datamodule, "_corpus", None), "manifest", None)
    return {**comparable(), "run_folder": str(run), "config": leaves, "data": flat(manifest or {})}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, of nested dictionaries."""
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    return {k: v for name, one in value.items() for k, v in flat(one, f"{prefix}.{name}".lstrip(".")).items()}


def table(values: list[dict[str, Any]]) -> str:
    """Key, and which ranks have what, of the keys that differ; `values` are those of each rank."""
    rows = []
    for group in values[0]:
        of_ranks = [value[group] for value in values]
        if all(isinstance(value, dict) for value in of_ranks):
            names = sorted({name for value in of_ranks for name in value})
            columns = {f"{group}.{name}": [value.get(name, NOTHING) for value in of_ranks] for name in names}
        else:
            columns = {group: of_ranks}
        for key, column in columns.items():
            texts = [_short(one) for one in column]
            if len({str(one) for one in column}) == 1:
                continue
            ranks: dict[str, list[int]] = {}
            for rank, one in enumerate(column):
                ranks.setdefault(str(one), []).append(rank)
            rows += [(key, rank_ranges(there), texts[there[0]]) for there in ranks.values()]
    width, ranks_width = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines = [f"  {key:<{width}}  {ranks:<{ranks_width}}  {text}" for key, ranks, text in rows]
    head = "these ranks do not run the same; make it so, or allow a difference: --same_environment.ignore '[KEY, …]'"
    return "\n".join([head, f"  {'key':<{width}}  {'ranks':<{ranks_width}}  have", *lines])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"
