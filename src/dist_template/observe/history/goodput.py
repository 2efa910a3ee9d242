"""Reads where a run's time went; callbacks/goodput.py writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .metrics import read_lines

KINDS = ("productive", "start", "restart", "checkpoint", "data_wait", "validation", "lost")
FILE = "goodput.jsonl"


def read(run: Path) -> dict[str, float]:
    """Returns the seconds of each kind over all attempts of the run in the folder `run`; {} if nothing was written."""
    attempts: dict[float, dict[str, Any]] = {event["attempt"]: event for event in read_lines(run / FILE)}
    total = dict.fromkeys(KINDS, 0.0)
    done: list[list[float]] = []  # each attempt's first step, last step, and productive seconds that were not lost
    end = None
    for began in sorted(attempts):
        attempt = attempts[began]
        for kind in KINDS:
            total["restart" if kind == "start" and end else kind] += attempt.get(kind, 0.0)
        total["restart"] += max(0.0, began - end) if end else 0.0
        end = attempt["time"]
        for part in done:  # steps after the one resumed from are done again
            first, last, seconds = part
            again = max(0.0, last - max(first, attempt["from_step"])) / max(last - first, 1)
            total["productive"] -= again * seconds
            total["lost"] += again * seconds
            part[1:] = [min(last, max(first, attempt["from_step"])), (1 - again) * seconds]
        done.append([attempt["from_step"], attempt["step"], attempt.get("productive", 0.0)])
    return total if attempts else {}


def share(seconds: dict[str, float]) -> float:
    """Returns the productive share of the wall time."""
    return seconds["productive"] / max(sum(seconds.values()), 1e-9)


def describe(seconds: dict[str, float]) -> str:
    """Returns one line for the terminal."""
    rest = {kind.replace("_", " "): s for kind, s in seconds.items() if s >= 0.5 and kind != "productive"}
    parts = [f"{share(seconds):.0%} of {sum(seconds.values()):.0f} s productive"]
    return ", ".join(parts + [f"{kind} {s:.0f} s" for kind, s in rest.items()])
