"""Single values that the libraries accept, and with which training fails later."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...project import is_users
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
    modules = [sys.modules.get(each.__module__) for each in type(setup.module).__mro__]
    files = {getattr(module, "__file__", None) or "" for module in modules}
    files = [file for file in files if file and is_users(file)]
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    own_words = set(re.findall(r"\w+", " ".join(texts)))
    for key, metric in monitored.items():
        near = get_close_matches(str(metric), MEASURED, 1, cutoff=0.8)
        if not near or metric in MEASURED or str(metric).rpartition("/")[2] in own_words:
            continue  # a metric of the user's own module may resemble one of these
        yield f"{key} is {metric!r}, which no validation measures; did you mean {near[0]}?"


def ignored(setup: Setup) -> Iterator[str]:
    """Keys with another value than their default that this training does not read."""
    if not setup.trains:
        return
    if setup.optim is not None and setup.optim.optimizer:
        name = setup.optim.optimizer["class_path"].rpartition(".")[2]
        why = f"--optimizer {name} has its own: give --optimizer.KEY, if it has that key"
        yield from without_effect("model.optim", setup.optim, {"betas", "eps"}, why)


def without_effect(section: str, given: Any, unread: set[str], why: str) -> Iterator[str]:
    """Yields a sentence for each key in `unread` of `given` that is not its default."""
    default = type(given)()
    for key in sorted(unread):
        if (value := getattr(given, key)) != getattr(default, key):
            yield f"{section}.{key} is {value!r} and has no effect ({why}), or remove the key"
