"""Names the rank that caused a hang, from the status of each rank."""

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
    done = sorted({*finished, *(rank for rank, each in statuses.items() if each["is_finished"])})
    statuses = {rank: each for rank, each in statuses.items() if rank not in done}
    if not silent and not done and (uneven := _uneven(statuses)):
        return uneven
    by_beats: dict[int, list[int]] = {}
    for rank, status in statuses.items():
        by_beats.setdefault(status["beats"], []).append(rank)
    behind = by_beats[min(by_beats)] if by_beats else []
    behind = [rank for rank in behind if not statuses[rank]["waits"]] or behind
    parts = []
    if silent:
        behind = silent
        parts.append(
            f"{ranks_text(silent)} unresponsive: the process is stopped or its node is lost"
        )
    elif len(behind) == len(statuses) > 1:
        parts.append("no rank is behind the others")
    behind, stalled, waiting = {*behind}, {}, {}  # ranks by place
    for rank, status in statuses.items():
        place = status["place"]
        if rank in behind:
            stalled.setdefault(f"stalled: {place}, {status['line']}", []).append(rank)
        else:
            waiting.setdefault(place, []).append(rank)
    parts += [f"{ranks_text(ranks)} {place}" for place, ranks in stalled.items()]
    for place, ranks in waiting.items():
        parts.append(f"{ranks_text(ranks)} waiting for it in {place.removeprefix('in ')}")
    if done:
        have = "rank {} has" if len(done) == 1 else "ranks {} have"
        parts.append(f"{have.format(rank_ranges(done))} finished")
    return "; ".join(parts)


def _uneven(statuses: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns a sentence if the data of some ranks have ended, and others have begun a later batch;
    "" otherwise."""
    ended, training = dict[int, int](), dict[int, int]()  # batches by rank
    for rank, status in statuses.items():
        (ended if status.get("has_ended") else training)[rank] = status.get("batches", 0)
    if not ended or not training or max(training.values()) <= min(ended.values()):
        return ""
    rank = min(ended, key=lambda each: ended[each])
    further = max(training, key=lambda each: training[each])
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
    texts, first = [], 0
    for index, rank in enumerate(ranks):
        if index + 1 == len(ranks) or ranks[index + 1] != rank + 1:
            texts.append(str(rank) if first == index else f"{ranks[first]}-{rank}")
            first = index + 1
    return ", ".join(texts)
