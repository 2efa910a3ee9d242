"""Memory, messages and time of a strategy, for `plan` and the diagnosis; candidates.py has the strategies that a
machine allows. No torch."""

from __future__ import annotations

from typing import Any

from ...plugins import loaded
from ..answers import Mesh, sharding_of
from .mesh import MeshEstimate
from .plain import Estimate

GROUP = "dist_template.estimates"  # entry points: name of a strategy's class, and a class such as MeshEstimate


def estimate_of(strategy: Any) -> Estimate:
    """Returns the estimate of `trainer.strategy`, which `sharding_of` accepts too."""
    sharding = sharding_of(strategy)
    if isinstance(sharding, Mesh):
        return MeshEstimate.of(sharding.arguments)
    if kind := loaded(GROUP).get(sharding.name):
        return kind.of(sharding.arguments)
    return Estimate(sharding.arguments, sharding.name, sharding.bases)
