"""Single values that the libraries accept, and with which training fails later."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from .machine import Setup

MEASURED = ("eval/loss", "eval/perplexity", "eval/token_accuracy", "eval/bits_per_byte")


def monitors(setup: Setup) -> Iterator[str]:
    """A misspelt metric, of which the first validation would complain; other names are allowed."""
    if not setup.trains:
        return
    monitored = {"best_checkpoint.monitor": setup.monitor}
    monitored["model.optim.plateau_metric"] = getattr(setup.optim, "plateau_metric", None)
    callbacks = setup.trainer.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        key = f"trainer.callbacks, {type(callback).__name__}.monitor,"
        monitored[key] = getattr(callback, "monitor", None)
    file = getattr(sys.modules.get(type(setup.module).__module__), "__file__", None)
    own_words = re.findall(r"\w+", Path(file).read_text(encoding="utf-8")) if file else []
    for key, metric in monitored.items():
        near = get_close_matches(str(metric), MEASURED, 1, cutoff=0.8)
        if not near or metric in MEASURED or str(metric).rpartition("/")[2] in own_words:
            continue  # a metric of the user's own module may resemble one of these
        yield f"{key} is {metric!r}, which no validation measures; did you mean {near[0]}?"


def intervals(setup: Setup) -> Iterator[str]:
    """An interval of 0 divides by zero in the first step; a negative norm reverses gradients."""
    for key in ("log_every_n_steps", "val_check_interval"):
        value = setup.trainer.get(key)
        if isinstance(value, int | float) and value <= 0:
            yield f"trainer.{key} is {value}: set 1 or more"
    clip = setup.trainer.get("gradient_clip_val")
    if clip is not None and not clip >= 0:
        yield f"trainer.gradient_clip_val is {clip}: set the largest norm, or 0 for no clipping"
