"""Names the rank that caused a hang, from the status of each rank.

1  Ranks that have finished are set aside.
2  If the data of some ranks ended before others', they do not hang: the sentence says so.
3  Stalled are the ranks that do not answer; else those with the least progress, without those that
   wait for another rank.
4  The sentence names them with their line of code, and where the others wait."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["find_stalled"]


def find_stalled(
    statuses: Mapping[int, Mapping[str, Any]], silent: list[int], finished: Sequence[int] = ()
) -> str:
    """Returns a sentence that names the stalled rank: one of the `silent` ones, which do not
    answer, else those with the least progress which do not wait for another rank. `statuses`, of
    the ranks that answer, have `beats`, progress that every rank makes equally; `place`; `line`,
    file:line of the innermost frame; `waits`, for other ranks; `is_finished`, which such ranks are
    not behind; and may have `batches`, of training in this epoch, and `has_ended`, whether its data
    have. `finished` are further ranks that have finished."""
    done = set(finished)
    for rank, status in statuses.items():
        if status["is_finished"]:
            done.add(rank)
    statuses = {rank: status for rank, status in statuses.items() if rank not in done}
    if not silent and not done:
        uneven = _uneven(statuses)
        if uneven:
            return uneven
    parts = []
    if silent:
        behind = set(silent)
        parts.append(
            f"{ranks_text(silent)} unresponsive: the process is stopped or its node is lost"
        )
    else:
        behind = _least_advanced(statuses)
        if len(behind) == len(statuses) > 1:
            parts.append("no rank is behind the others")
    # Ranks by what is said of them.
    stalled: dict[str, list[int]] = {}
    waiting: dict[str, list[int]] = {}
    for rank, status in statuses.items():
        place = status["place"]
        if rank in behind:
            stalled.setdefault(f"{place}, {status['line']}", []).append(rank)
        else:
            waiting.setdefault(place, []).append(rank)
    for place, ranks in stalled.items():
        parts.append(f"{ranks_text(ranks)} stalled: {place}")
    for place, ranks in waiting.items():
        parts.append(f"{ranks_text(ranks)} waiting for it in {place.removeprefix('in ')}")
    if len(done) == 1:
        parts.append(f"rank {rank_ranges(list(done))} has finished")
    elif done:
        parts.append(f"ranks {rank_ranges(sorted(done))} have finished")
    return "; ".join(parts)


def _least_advanced(statuses: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """Returns the ranks with the least progress; of these, those that do not wait for another rank,
    if there are any."""
    if not statuses:
        return set()
    least = min(status["beats"] for status in statuses.values())
    behind = {rank for rank, status in statuses.items() if status["beats"] == least}
    busy = {rank for rank in behind if not statuses[rank]["waits"]}
    return busy if busy else behind


def _uneven(statuses: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns a sentence if the data of some ranks have ended, and others have begun a later batch;
    "" otherwise."""
    ended: dict[int, int] = {}  # batches by rank
    training: dict[int, int] = {}
    for rank, status in statuses.items():
        batches = ended if status.get("has_ended") else training
        batches[rank] = status.get("batches", 0)
    if not ended or not training or max(training.values()) <= min(ended.values()):
        return ""
    rank = min(ended, key=ended.__getitem__)
    further = max(training, key=training.__getitem__)
    return (
        f"the data of rank {rank} ended after batch {ended[rank]} of the epoch, and rank {further}"
        f" is in batch {training[further]}: no rank is stalled; all ranks need equally many batches"
        " (limit_train_batches, or a loader that pads or drops the rest)"
    )


def ranks_text(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5 are"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {rank_ranges(ranks)} are"


def rank_ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    texts = []
    first = 0  # index of the first rank of a range
    for index, rank in enumerate(ranks):
        is_last = index + 1 == len(ranks) or ranks[index + 1] != rank + 1
        if is_last:
            texts.append(str(rank) if first == index else f"{ranks[first]}-{rank}")
            first = index + 1
    return ", ".join(texts)
