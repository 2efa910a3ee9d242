"""Starts, runs and watches distributed training of a LightningModule: the library behind the project template.

Names are imported when they are first used: `python -m <package> --help` needs neither torch nor
Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PLACES = {  # public name -> the module that defines it
    "main": "cli.main",
    "InputError": "errors",
    "Ended": "errors",
    "Project": "project",
    "TrainingModule": "model.training_module",
    "BlockConfig": "parallel.blocks",
    "BalanceConfig": "model.balance",
    "OptimConfig": "model.optim",
}

__all__ = [*PLACES]  # noqa: PLE0604  (lazy)


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PLACES})
