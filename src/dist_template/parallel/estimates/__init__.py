"""Memory, messages and time of a strategy, for `plan` and the diagnosis; candidates.py has the strategies that a
machine allows. No torch."""

from __future__ import annotations

from typing import Any

from ..answers import Mesh, Zero, sharding_of
from .mesh import MeshEstimate
from .plain import Estimate
from .zero import ZeroEstimate


def estimate_of(strategy: Any) -> Estimate:
    """Returns the estimate of `trainer.strategy`, which `sharding_of` accepts too."""
    sharding = sharding_of(strategy)
    if isinstance(sharding, Mesh):
        return MeshEstimate.of(sharding.arguments)
    if isinstance(sharding, Zero):
        return ZeroEstimate.of(sharding.arguments)
    return Estimate(sharding.arguments, sharding.name, sharding.bases)
