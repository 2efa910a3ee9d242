"""ZeroStrategy: DeepSpeed's ZeRO.

spec.py       its configuration, before a start
strategy.py   ZeroStrategy
json.py       completes a DeepSpeed JSON; check.py checks a user's
format.py     its checkpoints"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Run folders and checkpoints name the class by this package; it imports torch."""
    if name == "ZeroStrategy":
        from .strategy import ZeroStrategy

        return ZeroStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
