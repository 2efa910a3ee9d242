"""Checks of a TextModule before a start: its adapters, its keys of an architecture, its loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..cli.limits.machine import ARGS, NOT_READ_YET, Setup
from ..cli.limits.options import without_effect
from ..errors import InputError
from ..model.training_module import TrainingModule
from .model.adapters import AdapterConfig, add_adapters, refuse_tensor_parallel
from .model.causal_lm import checked_fields
from .model.head import Kernel
from .preference_loss import PreferenceConfig, has_pairs


def refusals(
    module: TrainingModule,
    setup: Setup,
    loss_kernel: Kernel,
    adapter: AdapterConfig | None,
    preference: PreferenceConfig,
) -> Iterator[str]:
    """Yields a sentence for each setting of a TextModule that cannot work, or has no effect."""
    tensor_parallel = setup.mesh.tp if setup.mesh is not None else 1
    if loss_kernel == "liger" and tensor_parallel > 1:
        yield (
            "model.loss_kernel liger needs the full output layer, and tensor parallelism"
            f" (tp_size {tensor_parallel}) shards it: set torch"
        )
    # an unknown key, before the data are tokenized; afterwards `build_config` refuses it
    given = getattr(module, "architecture", None)
    is_read = setup.model_config is not NOT_READ_YET or getattr(module, "pretrained", None)
    if isinstance(given, dict) and not is_read:
        try:
            checked_fields(given)
        except InputError as error:
            yield str(error)
    if adapter is not None:
        yield from _of_adapter(module, adapter, setup, tensor_parallel)
    if setup.trains:
        unread, why = set[str](), f"model.preference.loss {preference.loss} does not read it"
        if not has_pairs(setup.data):
            unread, why = {*vars(preference)}, "data.source yields no pairs: set Preferences there"
        elif preference.loss != "simpo":
            unread = {"margin"}
        elif preference.precompute:
            unread = {"precompute"}
        yield from without_effect("model.preference", preference, unread, why)


def _of_adapter(
    module: TrainingModule, config: AdapterConfig, setup: Setup, tensor_parallel: int
) -> Iterator[str]:
    """Yields names that match nothing, and what a strategy does not support with adapters."""
    if config.dora and config.quantize:
        yield "model.adapter.dora needs unpacked weights: set it to false, or quantize to null"
    for key in ("quantize", "dora"):
        if getattr(config, key) and tensor_parallel > 1:
            yield (
                f"model.adapter.{key} does not work with tensor parallelism: unset it, or set"
                f" {ARGS}.tp_size {tensor_parallel} to 1"
            )
    if setup.model_config in (NOT_READ_YET, None) or not getattr(setup.data, "is_prepared", True):
        return
    try:
        with torch.device("meta"):  # without weights
            model = add_adapters(module.build_model(setup.data), config)
        if tensor_parallel > 1:
            refuse_tensor_parallel(model)
    except InputError as error:
        yield str(error)
