"""The type of a numeric flag of a verb: argparse's int and float accept -1, nan and 10**12."""

import argparse
from collections.abc import Callable


def in_range(kind: Callable[[str], float], least: float, most: float = 1_000_000_000) -> Callable:
    """Returns the `type` of a flag that accepts `kind`, int or float, from `least` to `most`."""

    def read(text: str) -> float:
        what = "a whole number" if kind is int else "a number"
        try:
            if least <= (value := kind(text)) <= most:  # nan is not
                return value
        except ValueError:
            pass
        allowed = f"give {what} from {least:,} to {most:,}"
        raise argparse.ArgumentTypeError(f"{text[:50]!r} is not allowed, {allowed}")

    return read
