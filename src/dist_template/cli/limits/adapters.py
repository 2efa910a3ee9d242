"""model.adapter: names that match nothing, and what a strategy cannot do with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...errors import InputError
from ...model.adapters import add_adapters
from .machine import ARGS, NOT_READ_YET, Setup


def adapter(setup: Setup) -> Iterator[str]:
    module: Any = setup.module
    config = getattr(module, "adapter", None)
    if config is None:
        return
    size = setup.mesh.tp if setup.mesh is not None else 1
    if config.dora and config.quantize:
        yield "model.adapter.dora needs unpacked weights: set it to false, or quantize to null"
    for key, is_set in (("quantize", config.quantize), ("dora", config.dora)):
        if is_set and size > 1:
            yield (
                f"model.adapter.{key} does not work with tensor parallelism: unset it, or set"
                f" {ARGS}.tp_size {size} to 1"
            )
    is_known = setup.model_config not in (NOT_READ_YET, None)
    if not (is_known and getattr(setup.data, "is_prepared", True)):
        return
    try:
        with torch.device("meta"):  # without weights
            add_adapters(module.build_model(setup.data), config)
    except InputError as error:
        yield str(error)
