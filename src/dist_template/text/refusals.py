"""Checks of a TextModule before a start: its adapters, its keys of an architecture, its loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..cli.limits.machine import Setup
from ..cli.limits.options import without_effect
from ..errors import InputError
from ..model.training_module import TrainingModule
from ..parallel.configured import NOT_READ_YET
from .model.adapters import AdapterConfig, add_adapters
from .model.causal_lm import checked_fields
from .preference_loss import PreferenceConfig, has_pairs


def refusals(
    module: TrainingModule,
    setup: Setup,
    adapter: AdapterConfig | None,
    preference: PreferenceConfig,
) -> Iterator[str]:
    """Yields a sentence for each setting of a TextModule that cannot work, or has no effect."""
    # an unknown key, before the data are tokenized; afterwards `build_config` refuses it
    given = getattr(module, "architecture", None)
    is_read = setup.model_config is not NOT_READ_YET or getattr(module, "pretrained", None)
    if isinstance(given, dict) and not is_read:
        try:
            checked_fields(given)
        except InputError as error:
            yield str(error)
    if adapter is not None:
        yield from _of_adapter(module, adapter, setup)
    if setup.trains:
        unread, why = set[str](), f"model.preference.loss {preference.loss} does not read it"
        if not has_pairs(setup.data):
            unread, why = {*vars(preference)}, "data.source yields no pairs: set Preferences there"
        elif preference.loss != "simpo":
            unread = {"margin"}
        elif preference.precompute:
            unread = {"precompute"}
        yield from without_effect("model.preference", preference, unread, why)


def _of_adapter(module: TrainingModule, config: AdapterConfig, setup: Setup) -> Iterator[str]:
    """Yields names that match nothing; strategies say what they do not support."""
    if config.dora and config.quantize:
        yield "model.adapter.dora needs unpacked weights: set it to false, or quantize to null"
    if setup.model_config in (NOT_READ_YET, None) or not getattr(setup.data, "is_prepared", True):
        return
    try:
        with torch.device("meta"):  # without weights
            add_adapters(module.build_model(setup.data), config)
    except InputError as error:
        yield str(error)
