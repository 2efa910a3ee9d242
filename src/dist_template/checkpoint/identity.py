"""Compares what a checkpoint was trained on with what a resumed run would train on.

A data module's `fixed_settings()` and a module's `fixed_settings(data)` return keys and plain
values that decide the samples, the model's function, its loss or its updates; a hash stands for
content. Checkpoints have them in their manifest. Keys that only one side has are not compared: a
checkpoint of an earlier version has none. A field that one model's configuration lacks is null.

When a run resumes, `compare` sorts the settings that differ:

    accepted, or neither samples nor function depend on it   a line is printed
    the checkpoint's schedule or optimizer restores it       the line says so
    another                                                  refused, with the flag that accepts it
"""

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
    r"|optimizer\..*|lr_scheduler.*|(?!model\.objective\.).*(drop|coef|initializer).*"
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
    of_module = getattr(module, KEY, None)
    if of_module is not None:
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
    have_models = _model_prefix(before) and _model_prefix(now)
    if have_models:
        # An export of the checkpoint has the fields of model.architecture under model.pretrained.
        before = {MODEL.sub(_model_prefix(now), key): value for key, value in before.items()}
    unknown = set(accept) - before.keys() - now.keys() - OF_AN_ORDER
    if unknown:
        raise InputError(f"{ACCEPT} has {min(unknown)}, which is no setting here: remove it")
    changed = []
    for key in before | now:
        old, new = before.get(key), now.get(key)
        is_on_both_sides = key in before and key in now
        is_field = have_models and MODEL.match(key) and (old or new)
        if old != new and (is_on_both_sides or is_field):
            changed.append(key)
    fixed = list(filterfalse(PRINTED.fullmatch, changed))
    types = [key for key in fixed if MODEL.sub("", key) == "model_type"]
    if types:
        # Of another architecture, the other fields differ too: they are not listed.
        fixed = types + list(filterfalse(MODEL.match, fixed))
    refused = [key for key in fixed if key not in accept]
    if refused:
        values = [f"{key} {before.get(key)}, now {now.get(key)}" for key in refused]
        raise InputError(
            f"{str(path)!r} was trained with {'; '.join(values)}: restore the old value, or"
            f" continue with the new one by --{ACCEPT} '[{', '.join(fixed)}]'"
        )
    effective = []
    for key in changed:
        line = f"{key} {before.get(key)} -> {now.get(key)}"
        if _is_restored(key, has_new_optimizer="optimizer" in fixed):
            now[key] = before[key]
            line += " (no effect: a resume keeps the checkpoint's)"
        else:
            effective.append(key)
        rank_zero_only(print)(line)
    return effective


def _model_prefix(settings: dict[str, object]) -> str:
    """Returns what the keys of the model's fields start with; "" without a published model."""
    for key in settings:
        found = MODEL.match(key)
        if found:
            return found[0]
    return ""


def _is_restored(key: str, has_new_optimizer: bool) -> bool:
    """Returns whether a resume restores the checkpoint's value. An accepted new class of optimizer
    reads no state of the old one; the schedule reads its own."""
    found = RESTORED.fullmatch(key)
    if found is None:
        return False
    is_of_schedule = found[1] is not None
    return is_of_schedule or not has_new_optimizer
