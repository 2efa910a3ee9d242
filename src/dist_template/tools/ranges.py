"""Types of verbs' flags: argparse's int and float accept -1, nan and 10**12, and its str ""."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MOST = 1_000_000_000


def in_range(
    kind: Callable[[str], float], least: float, most: float = MOST
) -> Callable[[str], float]:
    """Returns the `type` of a flag that accepts `kind`, int or float, from `least` to `most`."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # nan is not
            what = "a whole number" if kind is int else "a number"
            allowed = f"give {what} from {least:,} to {most:,}"
            raise argparse.ArgumentTypeError(f"{text[:50]!r} is not allowed, {allowed}")
        return value

    return read


def text(given: str) -> str:
    """The `type` of a flag whose value is a name or a path."""
    if not given.strip():
        raise argparse.ArgumentTypeError(f"{given!r} is empty, give a name")
    return given
