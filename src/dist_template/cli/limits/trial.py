"""Runs one rank's part of the model without memory, before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...compat.transformers import needs_values
from ...errors import reason
from ...parallel.pipeline.division import try_stages
from ...parallel.pipeline.partition import facts_of
from ...parallel.sequence import try_shard
from ...parallel.shard import complete_plan
from .machine import ARGS, NOT_READ_YET, Setup


def trial(setup: Setup) -> Iterator[str]:
    """What only a forward pass shows: shapes of a rank, positions, what stages pass on.

    It takes a tenth of a second for a model of 32 layers. A model that reads values of its tensors
    cannot run without memory, and is not refused here.
    """
    mesh, config, module = setup.mesh, setup.model_config, setup.module
    if mesh is None or mesh.tp == mesh.cp == mesh.pp == 1 or config in (NOT_READ_YET, None):
        return
    if not getattr(setup.data, "is_prepared", True):
        return
    attempts: dict[str, Callable[[Any], None]] = {
        "tp_size": lambda model: complete_plan(model, setup.strategy, mesh),
        "cp_size": lambda model: try_shard(model, mesh.cp),
        "pp_size": lambda model: _try_stages(model, setup.strategy, mesh.pp),
    }
    model: Any = None
    for key, attempt in attempts.items():
        if (size := getattr(mesh, key.removesuffix("_size"))) == 1:
            continue
        try:
            model = model or _build(module, setup.data)
            attempt(model)
        except Exception as error:
            if needs_values(error):
                continue
            why = reason(error)
            way_out = f"; set {ARGS}.{key} to 1, or choose another strategy"
            yield (
                f"a model of type {config.model_type!r} does not run with {key} {size}: {why}"
                f"{'' if f'{key} to 1' in why else way_out}"
            )


def _build(module: Any, data: Any) -> Any:
    with torch.device("meta"):
        if hasattr(module, "build_network"):
            return module.build_network(data, quantized=False)
        return module.build_model(data)


def _try_stages(model: Any, strategy: Any, size: int) -> None:
    keys = strategy.pp_schedule, strategy.pp_stages_per_rank, strategy.pp_layers
    try_stages(model, facts_of(model, size, *keys))
