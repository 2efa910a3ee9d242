"""Reads where a run's time went; callbacks/goodput.py writes it."""

from pathlib import Path
from typing import Any

from .run import RunFile, is_number, read_lines

__all__ = ["read"]

KINDS = ("productive", "start", "restart", "checkpoint", "data_wait", "validation", "lost")


def read_attempts(run: Path) -> list[dict[str, Any]]:
    found = []
    for line in read_lines(run / RunFile.GOODPUT, "attempt", "time", "step", "from_step"):
        if all(map(is_number, (line.get(kind, 0.0) for kind in KINDS))):
            found.append(line)
    return found


def read(run: Path) -> dict[str, float]:
    """Returns the seconds of each kind over all attempts of a run; {} if nothing was written."""
    attempts = {}
    for line in read_attempts(run):
        attempts[line["attempt"]] = line  # the last one counts
    total = dict.fromkeys(KINDS, 0.0)
    done: list[list[float]] = []  # first step, last step, productive seconds that are not lost
    end = None
    for began in sorted(attempts):
        attempt = attempts[began]
        for kind in KINDS:
            total[kind] += attempt.get(kind, 0.0)
        if end:  # the time between two attempts, and the start of the later one
            total["restart"] += max(0.0, began - end) + attempt.get("start", 0.0)
            total["start"] -= attempt.get("start", 0.0)
        end = attempt["time"]
        for part in done:  # steps after the one resumed from are done again
            first, last, seconds = part
            resumed = max(first, attempt["from_step"])
            repeated = max(0.0, last - resumed) / max(last - first, 1)
            total["productive"] -= repeated * seconds
            total["lost"] += repeated * seconds
            part[1:] = [min(last, resumed), (1 - repeated) * seconds]
        done.append([attempt["from_step"], attempt["step"], attempt.get("productive", 0.0)])
    return total if attempts else {}


def share(seconds: dict[str, float]) -> float:
    """Returns the productive share of the wall time."""
    return seconds["productive"] / max(sum(seconds.values()), 1e-9)


def describe(seconds: dict[str, float]) -> str:
    """Returns one line for the terminal."""
    parts = [f"{share(seconds):.0%} of {sum(seconds.values()):.0f} s productive"]
    for kind, spent_s in seconds.items():
        if spent_s >= 0.5 and kind != "productive":
            parts.append(f"{kind.replace('_', ' ')} {spent_s:.0f} s")
    return ", ".join(parts)
