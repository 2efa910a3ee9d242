"""Compares what a checkpoint was trained on with what a resumed run would train on.

A data module's `fixed_settings()` and a module's `fixed_settings(data)` return keys and plain
values that decide the samples, the model's function or its loss; a hash stands for content.
Checkpoints have them in their manifest. Keys that only one side has are not compared: a checkpoint
of an earlier version has none."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from ..errors import InputError
from . import manifest

KEY = "fixed_settings"  # of a manifest, and the method's name
ACCEPT = "last_checkpoint.accept_changes"
MOST_CHARACTERS = 80  # of a value; a hash stands for a longer one
# A change of these is printed: neither the samples nor what the weights compute depend on them.
PRINTED = re.compile(
    r"data\.(global_batch_size|source\.weights)|model\.balance\..*|.*(drop|coef|initializer).*"
)
MODEL = re.compile(r"model\.(architecture|pretrained)\..*")
# With one of these, it is another model: loading refuses it and names the tensors.
SHAPES = re.compile(
    r".*\.(model_type|hidden_size|intermediate_size|num_hidden_layers|n_embd|n_inner|n_layer)"
)


def fixed_settings(data: Any, module: Any) -> dict[str, Any]:
    """Returns the settings of a data module and a module, as JSON has them."""
    found = getattr(data, KEY, dict)()
    if hasattr(module, KEY):
        found |= module.fixed_settings(data)
    return {key: _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True, default=str)
    is_short = len(text) <= MOST_CHARACTERS
    return json.loads(text) if is_short else hashlib.sha256(text.encode()).hexdigest()[:12]


def settings_of(path: Path) -> dict[str, Any]:
    """Returns the settings of the checkpoint that would be loaded by `path`; {} if it has none."""
    for candidate in manifest.meant(path)[1]:
        if not manifest.torn(candidate):
            return manifest.read(candidate).get(KEY, {})
    return {}


def compare(
    path: Any, before: dict[str, Any], now: dict[str, Any], accepted: list[str]
) -> list[str]:
    """Returns the keys that differ, and prints a line for each.

    Args:
        path: The checkpoint, for the message.
        before: Its settings.
        now: Those of the run that resumes.
        accepted: Keys that may differ.

    Raises:
        InputError: one differs that is not accepted, and the samples or the function depend on it.
    """
    changed = [key for key in before if key in now and before[key] != now[key]]
    if any(SHAPES.fullmatch(key) for key in changed):
        changed = [key for key in changed if not MODEL.fullmatch(key)]
    fixed = [key for key in changed if not PRINTED.fullmatch(key)]
    if not set(fixed) <= {*accepted}:
        values = [f"{key} {before[key]}, now {now[key]}" for key in fixed if key not in accepted]
        raise InputError(
            f"{str(path)!r} was trained with {'; '.join(values)}: restore what it was, or train on"
            f" with the change by --{ACCEPT} '[{', '.join(fixed)}]'"
        )
    for key in changed:
        _print(f"{key} {before[key]} -> {now[key]}")
    return changed


@rank_zero_only
def _print(line: str) -> None:
    print(line)
