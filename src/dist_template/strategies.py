"""Strategies for any Lightning Trainer; importing this file registers their names:
`Trainer(strategy="fsdp2")`.

All of them run on GPUs and on CPU processes. ZeroStrategy needs the package deepspeed. They attach
by entry points as a strategy of another package does (docs/extend.md);
`dist_template.strategies.NAME` is every class that does."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

from .parallel.rank_view import is_strategy
from .plugins import STRATEGIES, loaded_parts

if TYPE_CHECKING:
    from .parallel.mesh.strategy import MeshStrategy

__all__ = ["MeshStrategy", "ZeroStrategy"]  # noqa: F822  (by __getattr__)

CLASSES = loaded_parts(STRATEGIES, "strategy_class", is_strategy)


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Lightning's registry has names with the class's arguments; this library's classes come last, so
# that no other one can take their names.
for _kind in reversed(CLASSES.values()):
    for _name, _arguments in getattr(_kind, "NAMES", {}).items():
        StrategyRegistry.register(
            _name, _kind, (_kind.__doc__ or "").split("\n")[0], override=True, **_arguments
        )
