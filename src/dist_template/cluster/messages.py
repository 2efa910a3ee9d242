"""Hides warnings on ranks other than 0: otherwise 64 ranks print the same line 64 times.

A warning is a message of Python's `warnings`, or of `logging` at level WARNING or below. Every rank
prints errors. The environment variable DIST_WARNINGS=all lets every rank print its warnings.

No slow imports here: libraries also warn while they are imported."""

import logging
import os
import warnings

__all__ = ["hide_warnings", "is_rank_zero"]


def hide_warnings() -> None:
    """Hides warnings from here on, unless this is rank 0."""
    if not is_rank_zero() and os.environ.get("DIST_WARNINGS") != "all":
        logging.disable(logging.WARNING)
        warnings.showwarning = lambda *_, **__: None  # ty: ignore[invalid-assignment]


def is_rank_zero() -> bool:
    """Returns whether this is rank 0, by the launchers' variables in Lightning's order."""
    environment = os.environ
    if "RANK" in environment:
        return environment["RANK"] == "0"
    if "LOCAL_RANK" in environment:
        nodes = {environment.get("NODE_RANK", "0"), environment.get("GROUP_RANK", "0")}
        return environment["LOCAL_RANK"] == "0" and nodes == {"0"}
    return environment.get("SLURM_PROCID", "0") == "0"
