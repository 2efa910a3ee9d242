"""Names the rank that caused a hang, from the status of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

__all__ = ["find_stalled", "rank_ranges"]


class Status(TypedDict):
    """State of one rank: its progress, and the line that runs."""

    beats: int  # progress that every rank makes equally
    place: str
    line: str  # file:line of the innermost frame
    waits: bool  # for other ranks


class Verdict(TypedDict):
    """Why there is no progress."""

    sentence: str
    silent: list[int]  # ranks that do not answer
    by: int  # the rank that prints the sentence


def find_stalled(statuses: Mapping[int, Mapping[str, Any]], silent: list[int]) -> Verdict:
    """Names the stalled rank: one that does not answer, else those with the least progress which do
    not wait for another rank.

    Args:
        statuses: `Status` of the ranks that answer.
        silent: The ranks that do not.
    """
    least = min(status["beats"] for status in statuses.values())
    behind = [rank for rank in statuses if statuses[rank]["beats"] == least]
    behind = [rank for rank in behind if not statuses[rank]["waits"]] or behind
    parts = []
    if silent:
        behind = silent
        causes = "are unresponsive: stopped processes or lost nodes"
        if len(silent) == 1:
            causes = "is unresponsive: its process is stopped or its node is lost"
        parts.append(f"{ranks_text(silent)} {causes}")
    elif len(behind) == len(statuses) > 1:
        parts.append("no rank is behind the others")
    waiting: dict[str, list[int]] = {}  # by place
    for rank, status in statuses.items():
        place = f"{status['place']}, {status['line']}"
        if rank not in behind:
            waiting.setdefault(status["place"], []).append(rank)
        elif len(statuses) == 1:
            parts.append(place)
        elif len(behind) == len(statuses):
            parts.append(f"rank {rank}: {place}")
        else:
            parts.append(f"rank {rank} is stalled: {place}")
    for place, ranks in waiting.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        parts.append(f"{ranks_text(ranks)} {verb} for it in {place.removeprefix('in ')}")
    return {"sentence": "; ".join(parts), "silent": silent, "by": min(statuses)}


def ranks_text(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    return f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}"


def rank_ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    texts, first = [], 0
    for index, rank in enumerate(ranks):
        if index + 1 == len(ranks) or ranks[index + 1] != rank + 1:
            texts.append(str(rank) if first == index else f"{ranks[first]}-{rank}")
            first = index + 1
    return ", ".join(texts)
