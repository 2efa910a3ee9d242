"""Compares a habit's training by the command line with plain Lightning's: the table's cells."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.lightning.arms import (
    RANKS,
    Habit,
    Trained,
    full,
    ours,
    plain,
    plain_record,
    read,
    written,
)
from tests.lightning.seen import KILLED

KILLS = (3, 6, 8)  # steps of two ranks: inside the first epoch, at its end, inside the next
TIMES = {"Timer"}  # callbacks whose state is a time
UNREAD = "current_score"  # of ModelCheckpoint: it is saved, and no resumed training reads it
NUMBER = re.compile(r"\d+\.\d+")  # in a text, such as the reason of a stop
REL = 2e-4  # of weights: FSDP2 and ZeRO-2 add in another order


def oracle_of(habit: Habit, way: str, folder: Path) -> Trained | None:
    """Returns plain Lightning's training, which ways of as many ranks share in `folder`; None of a
    habit that is refused, or that it refuses."""
    folder /= f"plain{RANKS[way]}"
    if habit.refusal(way):
        return None
    if habit.impossible and RANKS[way] > 1:
        error = plain_record(habit, way, folder).error
        assert habit.impossible in error, error
        return None
    return Trained(read(folder), written(folder)) if folder.exists() else plain(habit, way, folder)


def differences(
    habit: Habit, way: str, expected: Trained | None, folder: Path, kills: Sequence[int] = KILLS
) -> list[str]:
    """Returns what differs between plain Lightning's training and this library's, uninterrupted,
    and killed and resumed after each of those steps of two ranks; [] if nothing does."""
    record = ours(habit, way, folder)
    if part := habit.refusal(way):
        return [] if part in f"{record.refusal}{record.error}" else [f"not refused: {record.error}"]
    if not record.ok:
        return [f"whole: {record.error[:600]}"]
    whole = read(folder / "whole")
    if expected is None:
        found = _shares(whole)
    else:
        found = [f"whole: {each}" for each in compared(habit, expected, whole)]
        found += [f"whole: {each}" for each in _files(expected, folder)]
    # Then a resumed run is this library's uninterrupted one.
    if expected is None or habit.rows_differ or habit.is_different(way):
        expected = Trained(whole, written(folder))
        habit = replace(habit, rows_differ=False)
    steps = [step * 2 // RANKS[way] for step in kills]
    steps = [step for step in steps if step < expected.traces[0]["step"]]
    if not steps:
        return found
    again, place = folder / "again", f"{KILLED} after {', '.join(map(str, steps))}"
    for step in steps:
        ours(habit, way, again, kill_at=step, resumes=step != steps[0])
    record = ours(habit, way, again, resumes=True)
    if not record.ok:
        return [*found, f"{place}: {record.error[:600]}"]
    resumed = compared(habit, expected, read(again / "resumed"), steps[-1])
    return [*found, *(f"{place}: {each}" for each in (*resumed, *_files(expected, again)))]


def compared(
    habit: Habit, expected: Trained, traces: list[dict[str, Any]], after: int = 0
) -> list[str]:
    """Returns what differs between plain Lightning's ranks and these, from step `after` on."""
    found = []
    first = traces[0]
    for name in ("step", "epoch"):
        if first[name] != expected.traces[0][name]:
            found.append(f"{name} {first[name]}, not {expected.traces[0][name]}")
    rates, own = expected.traces[0]["rates"], first["rates"]
    if own and not _near(own, rates[len(rates) - len(own) :]):
        found.append(
            f"rates {_short(own)}, not {_short(rates[len(rates) - len(own) :])} of {len(rates)}"
        )
    if not after and len(own) != len(rates):
        found.append(f"{len(own)} batches, not {len(rates)}")
    if not habit.rows_differ:
        found += _rows(expected.traces, traces)
    else:
        found += _shares(traces)
    if not habit.rows_differ:
        shared = {
            name: value
            for name, value in _mean(expected.traces).items()
            if name not in habit.without
        }
        found += _metrics(shared, first["metrics"], habit.tolerance)
        for name, state in expected.traces[0]["callbacks"].items():
            theirs, mine = _plain(state), _plain(first["callbacks"].get(name))
            if after and isinstance(mine, dict) and UNREAD in mine and mine[UNREAD] is None:
                theirs = {**theirs, UNREAD: None}
            if name not in TIMES and not _same(theirs, mine):
                found.append(f"state of {name} {mine}, not {theirs}")
    if not after:
        mine, theirs = first["hooks"], expected.traces[0]["hooks"]
        if mine != theirs:
            found.append(f"hooks {mine[:6]}…({len(mine)}), not {theirs[:6]}…({len(theirs)})")
    if not habit.rows_differ:
        for name, weight in expected.weights.items():
            if not isinstance(weight, Tensor):  # an extra state
                if weight != first["weights"][name]:
                    found.append(f"{name} is {first['weights'][name]}, not {weight}")
                continue
            rel, least = max(REL, habit.tolerance), max(1e-5, habit.tolerance)
            if not torch.allclose(weight, first["weights"][name].to(weight), rel, least):
                apart = (weight - first["weights"][name]).abs().max().item()
                found.append(f"weight {name} differs by {apart:.2g}")
                break
    return found


def _files(expected: Trained, folder: Path) -> list[str]:
    files = written(folder)
    return [] if files == expected.files else [f"files {files}, not {expected.files}"]


def _plain(value: Any) -> Any:
    """Returns the state of a callback as numbers and texts, with files relative to its folder."""
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Tensor):
        return _plain(full(value).tolist())
    if isinstance(value, str):
        _, is_below, rest = f"{value}/".partition("/out/")
        return rest if is_below else value
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= REL * max(1.0, abs(one))
    if isinstance(one, str) and isinstance(other, str):
        return NUMBER.sub(_rounded, one) == NUMBER.sub(_rounded, other)
    return one == other


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.3g}"


def _near(one: list[list[float]], other: list[list[float]]) -> bool:
    if [*map(len, one)] != [*map(len, other)]:  # a callback may add groups of parameters
        return False
    first, second = (torch.tensor([*chain.from_iterable(each)]) for each in (one, other))
    return torch.allclose(first, second, 1e-6, 1e-9)


def _rows(expected: list[dict[str, Any]], traces: list[dict[str, Any]]) -> list[str]:
    """The rows of each batch over the ranks together, whoever has which."""
    their, own = (
        [_together(ranks, at) for at in range(len(ranks[0]["rows"]))]
        for ranks in (expected, traces)
    )
    tail = their[len(their) - len(own) :]
    for number, (mine, other) in enumerate(zip(own, tail, strict=False)):
        if mine != other:
            return [f"rows of batch {number}: {mine}, not {other}"]
    return []


def _together(ranks: list[dict[str, Any]], batch: int) -> list[int]:
    return sorted(row for rank in ranks for row in rank["rows"][batch])


def _shares(traces: list[dict[str, Any]]) -> list[str]:
    """Two ranks must not train on the same rows at random."""
    if len(traces) < 2:
        return []
    one, two = traces[0]["rows"], traces[1]["rows"]
    same = sum(first == second for first, second in zip(one, two, strict=False))
    return (
        [f"ranks train on the same rows in {same} of {len(one)} batches"]
        if same > len(one) / 2
        else []
    )


def _mean(traces: list[dict[str, Any]]) -> dict[str, float]:
    """The mean over plain Lightning's ranks, which are equally long; of what is reduced, itself."""
    ranks = [trace["metrics"] for trace in traces]
    return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}


def _metrics(expected: dict[str, float], own: dict[str, float], tolerance: float) -> list[str]:
    found = []
    for name, value in expected.items():
        if name not in own:
            found.append(f"metric {name} is missing")
        elif abs(own[name] - value) > max(1e-4, tolerance) * max(1.0, abs(value)):
            found.append(f"metric {name} {own[name]:.5f}, not {value:.5f}")
    return found


def _short(rates: list[list[float]]) -> str:
    return " ".join(f"{each[0]:.3g}" for each in rates)
