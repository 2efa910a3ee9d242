"""What `fit` asks a configured strategy before anything starts: its ranks, and what it refuses. No
torch."""

from collections.abc import Mapping
from typing import Any

from ...plugins import loaded
from .plain import Plain

GROUP = (
    "dist_template.shardings"  # entry points: name of a strategy's class, and a class such as Mesh
)


def is_sharding(value: object) -> bool:
    """a subclass of dist_template.parallel.spec.plain.Plain"""
    return isinstance(value, type) and issubclass(value, Plain)


def sharding_of(strategy: Any) -> Plain:
    """Returns the configuration of `trainer.strategy`: a name, a class path with arguments, or a
    strategy that has been constructed."""
    if isinstance(strategy, Plain):
        return strategy
    if isinstance(strategy, str):
        return Plain(name=strategy)
    kinds = loaded(GROUP, is_sharding)
    if isinstance(strategy, Mapping):
        name = str(strategy["class_path"]).rpartition(".")[2]
        arguments = {**(strategy.get("init_args") or {}), **(strategy.get("dict_kwargs") or {})}
        return kinds[name].of(arguments) if name in kinds else Plain(arguments, name)
    bases = tuple(kind.__name__ for kind in type(strategy).__mro__)
    for name in bases:
        if name in kinds:
            return kinds[name].of(strategy.arguments)
    return Plain(name=bases[0], bases=bases)
