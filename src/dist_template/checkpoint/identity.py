"""Compares what a checkpoint was trained on with what a resumed run would train on.

A data module's `fixed_settings()` and a module's `fixed_settings(data)` return keys and plain
values that decide the samples, the model's function, its loss or its updates; a hash stands for
content. Checkpoints have them in their manifest. Keys that only one side has are not compared: a
checkpoint of an earlier version has none. A field that one model's configuration lacks is null."""

import hashlib
import json
import re
from itertools import filterfalse
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from ..errors import InputError
from . import manifest

KEY = "fixed_settings"  # of a manifest, and the method's name
ACCEPT = "last_checkpoint.accept_changes"
MAX_CHARACTERS = 80  # of a value; a hash stands for a longer one
# A change of these is printed: neither the samples nor what the weights compute depend on them.
PRINTED = re.compile(
    r"data\.(global_batch_size|balance|rank_speeds|source\.weights)|model\.(balance|optim)\..*|trainer\..*"
    r"|optimizer\..*|lr_scheduler.*|.*(drop|coef|initializer).*"
)
# The state of the schedule (first group) or optimizer restores the checkpoint's values.
RESTORED = re.compile(
    r"(optimizer\.lr|lr_scheduler\..*|model\.optim\.learning_rate)"
    r"|optimizer.*|model\.optim\.(?:weight_decay|betas|eps)"
)
MODEL = re.compile(r"model\.(architecture|pretrained)\.")
OF_AN_ORDER = {"samples", "seed"}  # of a plain dataset: callbacks/sample_order.py compares them


def fixed_settings(
    trainer: L.Trainer, data: object, module: L.LightningModule
) -> dict[str, object]:
    """Returns the settings of a trainer, a data module and a module, as JSON has them."""
    found: dict[str, object] = getattr(data, KEY, dict)()
    for key in ("gradient_clip_val", "gradient_clip_algorithm", "precision"):
        found[f"trainer.{key}"] = getattr(trainer, key)
    if of_module := getattr(module, KEY, None):
        found |= of_module(data)
    plain = {}
    for key, value in found.items():
        text = json.dumps(value, sort_keys=True, default=str)
        plain[key] = json.loads(text)
        if len(text) > MAX_CHARACTERS:
            plain[key] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return plain


def manifest_of(path: Path) -> dict[str, Any]:
    """Returns the manifest of the checkpoint that would be loaded by `path`; {} if it has none."""
    for candidate in manifest.resolve(path)[1]:
        if not manifest.torn(candidate):
            return manifest.read(candidate)
    return {}


def settings_of(path: Path) -> dict[str, object]:
    """Returns the settings of the checkpoint that would be loaded by `path`; {} if it has none."""
    return manifest_of(path).get(KEY, {})


def compare(
    path: str | Path, before: dict[str, object], now: dict[str, object], accept: list[str]
) -> list[str]:
    """Prints a line for each key that differs, and returns those whose new value takes effect.
    Changes values in `now` that the checkpoint restores. Keys in `accept` may differ.

    Raises:
        InputError: one differs that is not accepted, and the samples or the function depend on it;
            or an accepted key does not exist."""
    starts = [next((m[0] for key in side if (m := MODEL.match(key))), "") for side in (before, now)]
    if all(starts):  # an export of the checkpoint has its fields under model.pretrained
        before = {MODEL.sub(starts[1], key): value for key, value in before.items()}
    if unknown := {*accept} - {*before, *now, *OF_AN_ORDER}:
        raise InputError(f"{ACCEPT} has {min(unknown)}, which is no setting here: remove it")
    changed = []
    for key in before | now:
        old, new = before.get(key), now.get(key)
        is_field = all(starts) and MODEL.match(key) and (old or new)
        if old != new and (is_field or key in before and key in now):
            changed.append(key)
    fixed = list(filterfalse(PRINTED.fullmatch, changed))
    if types := [key for key in fixed if MODEL.sub("", key) == "model_type"]:
        fixed = [*types, *filterfalse(MODEL.match, fixed)]  # other fields follow
    refused = [key for key in fixed if key not in accept]
    if values := [f"{key} {before.get(key)}, now {now.get(key)}" for key in refused]:
        raise InputError(
            f"{str(path)!r} was trained with {'; '.join(values)}: restore what it was, or train on"
            f" with the change by --{ACCEPT} '[{', '.join(fixed)}]'"
        )
    effective = []
    for key in changed:
        line, restored = f"{key} {before.get(key)} -> {now.get(key)}", RESTORED.fullmatch(key)
        if restored and (restored[1] or "optimizer" not in fixed):
            now[key] = before[key]
            line += " (no effect: a resume keeps the checkpoint's)"
        else:
            effective.append(key)
        rank_zero_only(print)(line)
    return effective
