"""Strategies for any Lightning Trainer; importing this file registers their names: `Trainer(strategy="fsdp2")`.

All of them run on GPUs and on CPU processes. ZeroStrategy needs the package deepspeed. It attaches by entry points as
a strategy of another package does (docs/extend.md); `dist_template.strategies.NAME` is every class that does.
"""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from .parallel.mesh import MeshStrategy
from .parallel.mesh_sizes import ReplicaAxis, TensorAxis
from .plugins import loaded

__all__ = ["MeshStrategy", "ZeroStrategy"]  # noqa: F822  (by __getattr__)

GROUP = "dist_template.strategies"
CLASSES = loaded(GROUP, ("MeshStrategy",))


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register(kind: type, names: dict[str, dict[str, Any]]) -> None:
    """Adds names to Lightning's registry, with the class's arguments."""
    for name, arguments in names.items():
        StrategyRegistry.register(name, kind, (kind.__doc__ or "").split("\n")[0], override=True, **arguments)


_register(
    MeshStrategy,
    {
        "fsdp2": {},
        "fsdp2_offload": {"cpu_offload": True},
        "hsdp": {ReplicaAxis.key: 2},
        "fsdp2_tp": {TensorAxis.key: 2},
    },
)
for _kind in CLASSES.values():
    _register(_kind, getattr(_kind, "NAMES", {}))
