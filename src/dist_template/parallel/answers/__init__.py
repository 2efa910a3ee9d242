"""What `fit` asks a configured strategy before anything starts: its ranks, and what it refuses. No torch."""

from collections.abc import Mapping
from typing import Any

from ...plugins import loaded
from .mesh import Mesh
from .plain import Plain

GROUP = "dist_template.shardings"  # entry points: name of a strategy's class, and a class such as Mesh


def _kinds() -> dict[str, Any]:
    """Returns the classes that answer for a strategy's class, by its name."""
    return loaded(GROUP, ("MeshStrategy",)) | {"MeshStrategy": Mesh}


def sharding_of(strategy: Any) -> Plain:
    """Returns the configuration of `trainer.strategy`: a name, a class path with arguments, or a
    strategy that has been constructed."""
    if isinstance(strategy, Plain):
        return strategy
    if isinstance(strategy, str):
        return Plain(name=strategy)
    if isinstance(strategy, Mapping):
        name = str(strategy["class_path"]).rpartition(".")[2]
        arguments = {**(strategy.get("init_args") or {}), **(strategy.get("dict_kwargs") or {})}
        return _kinds()[name].of(arguments) if name in _kinds() else Plain(arguments, name)
    bases = tuple(kind.__name__ for kind in type(strategy).__mro__)
    for name in bases:
        if name in _kinds():
            return _kinds()[name].of(strategy.arguments)
    return Plain(name=bases[0], bases=bases)
