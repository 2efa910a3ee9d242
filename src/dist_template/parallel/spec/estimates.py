"""Memory, messages and time of a strategy, for `plan` and the diagnosis; candidates.py has the
strategies that a machine allows. No torch."""

from collections.abc import Mapping
from typing import Any

from ...plugins import loaded
from ..configured import ARGS
from . import sharding_of
from .base import FILES, Estimate

__all__ = ["Estimate", "estimate_of"]

# entry points: name of a strategy's class, and a class such as MeshEstimate
GROUP = "dist_template.estimates"


def is_estimate(value: object) -> bool:
    """a subclass of dist_template.parallel.spec.base.Estimate"""
    return isinstance(value, type) and issubclass(value, Estimate)


def estimate_of(strategy: Any, changes: Mapping[str, Any] | None = None) -> Estimate:
    """Returns the estimate of `trainer.strategy`, which `sharding_of` accepts too, with the
    `changes` of a `Saving`: keys with new values, of which those of other sections have no
    effect."""
    sharding = sharding_of(_changed(strategy, changes or {}))
    if kind := loaded(GROUP, is_estimate).get(sharding.name):
        return kind.of(sharding.arguments)
    return Estimate(sharding.arguments, sharding.name, sharding.bases)


def _changed(strategy: Any, changes: Mapping[str, Any]) -> Any:
    strategy = FILES.get(changes.get("config", "")) or changes.get("trainer.strategy", strategy)
    if not isinstance(strategy, dict):
        return strategy or "auto"
    arguments = dict(strategy.get("init_args") or {})
    for key, value in changes.items():
        if key.startswith(f"{ARGS}."):
            arguments[key.removeprefix(f"{ARGS}.")] = value
    return {**strategy, "init_args": arguments}
