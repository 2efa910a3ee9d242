"""Strategies for any Lightning Trainer; importing this file registers their names: `Trainer(strategy="fsdp2")`.

All of them run on GPUs and on CPU processes. Those of ZeRO need the package deepspeed.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from .parallel.mesh import MeshStrategy
from .parallel.mesh_sizes import ReplicaAxis, TensorAxis
from .parallel.zero import ZeroStrategy

__all__ = ["MeshStrategy", "ZeroStrategy"]

NAMES: dict[str, tuple[type, dict[str, Any]]] = {  # name in Lightning's registry: class, arguments
    "fsdp2": (MeshStrategy, {}),
    "fsdp2_offload": (MeshStrategy, {"cpu_offload": True}),
    "hsdp": (MeshStrategy, {ReplicaAxis.key: 2}),
    "fsdp2_tp": (MeshStrategy, {TensorAxis.key: 2}),
    "zero1": (ZeroStrategy, {"stage": 1}),
    "zero2": (ZeroStrategy, {"stage": 2}),
    "zero2_offload": (ZeroStrategy, {"stage": 2, "offload_optimizer": True}),
    "zero3": (ZeroStrategy, {"stage": 3}),
    "zero3_offload": (ZeroStrategy, {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
}

for _name, (_kind, _arguments) in NAMES.items():
    StrategyRegistry.register(_name, _kind, (_kind.__doc__ or "").split("\n")[0], override=True, **_arguments)
