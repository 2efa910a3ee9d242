"""Lightning callbacks: what is measured, shown, saved and guarded during training.

cli/defaults.py has the order in which they run: measure, write, show, act. Those below also work in
any Trainer, without the command line; names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PLACES = {  # public name -> the file that defines it, in the order for a Trainer's `callbacks`
    "Watchdog": "watchdog",
    "RandomState": "random_state",
    "SampleOrder": "sample_order",
    "Numerics": "numerics",
    "Throughput": "throughput",
    "TrainingLog": "training_log",
    "Console": "console",
    "LastCheckpoint": "checkpoint",
    "BestCheckpoint": "checkpoint",
    "Goodput": "goodput",
    "Preemption": "preemption",
}

__all__ = [*PLACES]  # noqa: PLE0604  (lazy)


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{PLACES[name]}", __name__), name)
