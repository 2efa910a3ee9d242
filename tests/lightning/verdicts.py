"""Compares a habit's training by the command line with plain Lightning's: the table's cells."""

from pathlib import Path
from typing import Any

import torch

from tests.lightning.arms import RANKS, Habit, Trained, ours, plain, read

KILLS = {"first epoch": 3, "inside a later epoch": 8, "an epoch's end": 6}  # optimizer steps of two
REL = 2e-4  # of weights: FSDP2 and ZeRO-2 add in another order


def oracle_of(habit: Habit, way: str, folder: Path) -> Trained:
    return plain(habit, way, folder / f"plain{RANKS[way]}")


def differences(habit: Habit, way: str, expected: Trained, folder: Path) -> list[str]:
    """Returns what differs between plain Lightning's training and this library's, uninterrupted
    and resumed; [] if nothing does."""
    record = ours(habit, way, folder)
    if refusal := habit.refusal(way):
        return [] if refusal in record.refusal else [f"not refused: {record.error[:300]}"]
    if not record.ok:
        return [f"whole: {record.error[:300]}"]
    found = [f"whole: {each}" for each in compared(habit, expected, read(folder / "whole"))]
    steps = expected.traces[0]["step"]
    for place, step in KILLS.items():
        step = step * 2 // RANKS[way]
        if step >= steps:
            continue
        killed = folder / place.replace(" ", "_").replace("'", "")
        ours(habit, way, killed, kill_at=step)
        record = ours(habit, way, killed, resumes=True)
        if not record.ok:
            found.append(f"{place}: {record.error[:300]}")
            continue
        resumed = compared(habit, expected, read(killed / "resumed"), step)
        found += [f"{place}: {each}" for each in resumed]
    return found


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
        found += _metrics(
            {
                name: value
                for name, value in _mean(expected.traces).items()
                if name not in habit.without
            },
            first["metrics"],
            habit.amplifies,
        )
    if not after:
        mine = [name for name in first["hooks"] if "validation" not in name]
        theirs = [name for name in expected.traces[0]["hooks"] if "validation" not in name]
        if mine != theirs:
            found.append(f"hooks {mine[:6]}…({len(mine)}), not {theirs[:6]}…({len(theirs)})")
    if not habit.rows_differ:
        for name, weight in expected.weights.items():
            tolerance = habit.amplifies * torch.tensor([REL, 1e-5])
            if not torch.allclose(weight, first["weights"][name].to(weight), *tolerance.tolist()):
                apart = (weight - first["weights"][name]).abs().max().item()
                found.append(f"weight {name} differs by {apart:.2g}")
                break
    return found


def _near(one: list[list[float]], other: list[list[float]]) -> bool:
    first, second = torch.tensor(one), torch.tensor(other)
    return first.shape == second.shape and torch.allclose(first, second, 1e-6, 1e-9)


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


def _metrics(expected: dict[str, float], own: dict[str, float], amplifies: float) -> list[str]:
    found = []
    for name, value in expected.items():
        if name not in own:
            found.append(f"metric {name} is missing")
        elif abs(own[name] - value) > amplifies * 1e-4 * max(1.0, abs(value)):
            found.append(f"metric {name} {own[name]:.5f}, not {value:.5f}")
    return found


def _short(rates: list[list[float]]) -> str:
    return " ".join(f"{each[0]:.3g}" for each in rates)
