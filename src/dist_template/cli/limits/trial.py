"""Runs one rank's part of the model without memory, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...compat.transformers import needs_values
from ...errors import reason
from ...parallel.facts import ARGS, NOT_READ_YET
from .machine import Setup


def trial(setup: Setup) -> Iterator[str]:
    """What only a forward pass shows: shapes of a rank, positions, what stages pass on.

    It takes a tenth of a second for a model of 32 layers. A model that reads values of its tensors
    cannot run without memory, and is not refused here.
    """
    config = setup.model_config
    if config in (NOT_READ_YET, None) or not getattr(setup.data, "is_prepared", True):
        return
    model: Any = None
    for key, attempt in setup.sharding.trials(setup):
        try:
            model = model or _build(setup.module, setup.data)
            attempt(model)
        except Exception as error:
            if needs_values(error):
                continue
            name, why = key.partition(" ")[0], reason(error)
            way_out = f"; set {ARGS}.{name} to 1, or choose another strategy"
            yield (
                f"a model of type {config.model_type!r} does not run with {key}: {why}"
                f"{'' if f'{name} to 1' in why else way_out}"
            )


def _build(module: Any, data: Any) -> Any:
    with torch.device("meta"):
        if hasattr(module, "build_network"):
            return module.build_network(data, quantized=False)
        return module.build_model(data)
