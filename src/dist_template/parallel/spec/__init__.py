"""What a configured strategy answers before anything starts, by its `Spec`. No torch.

base.py         Spec: ranks, refusals, memory, messages and small form, as all strategies share them
plain.py        PlainSpec: strategies of Lightning's own
refusals.py     refusals that several strategies share
facts.py        the figures of a training from which memory and messages are computed
candidates.py   the strategies that a machine allows, for `plan`"""

from collections.abc import Mapping
from typing import Any

from ...plugins import STRATEGIES, all_of, loaded, note
from ..configured import ARGS
from .base import Spec
from .plain import FILES, PlainSpec

__all__ = ["Spec", "spec_of"]

# Groups of entry points of earlier versions, and what has their values now.
REPLACED_GROUPS = {
    "dist_template.shardings": "the methods of a Spec",
    "dist_template.estimates": "the methods of a Spec",
    "dist_template.checkpoint_formats": "its format_class",
}


def is_spec(value: object) -> bool:
    """a subclass of dist_template.parallel.spec.Spec, whose strategy_class returns the strategy
    (docs/extend.md)"""
    return isinstance(value, type) and issubclass(value, Spec)


def specs() -> dict[str, type[Spec]]:
    """Returns the specs of strategies by the names of their classes."""
    for group, instead in REPLACED_GROUPS.items():
        for plugin in all_of(group):
            note(
                f"{plugin.package}: its {plugin.name!r} of {group} has no effect: register one Spec"
                f" as {STRATEGIES}, and have this as {instead} (docs/extend.md)"
            )
    return loaded(STRATEGIES, is_spec)


def spec_of(strategy: Any, changes: Mapping[str, Any] | None = None) -> Spec:
    """Returns the configuration of `trainer.strategy`: a name, a class path with arguments, or a
    strategy that has been constructed.

    `changes` are those of a `Saving`: keys with new values, of which those of other sections have
    no effect."""
    strategy = _changed(strategy, changes or {})
    if isinstance(strategy, Spec):
        return strategy
    if isinstance(strategy, str):
        return PlainSpec(name=strategy)
    kinds = specs()
    if isinstance(strategy, Mapping):
        name = str(strategy["class_path"]).rpartition(".")[2]
        arguments = {**(strategy.get("init_args") or {}), **(strategy.get("dict_kwargs") or {})}
        return kinds[name].of(arguments) if name in kinds else PlainSpec(arguments, name)
    bases = tuple(kind.__name__ for kind in type(strategy).__mro__)
    for name in bases:
        if name in kinds:
            return kinds[name].of(strategy.arguments)
    return PlainSpec(name=bases[0], bases=bases)


def _changed(strategy: Any, changes: Mapping[str, Any]) -> Any:
    strategy = FILES.get(changes.get("config", "")) or changes.get("trainer.strategy", strategy)
    if not isinstance(strategy, dict):
        return strategy or "auto"
    arguments = dict(strategy.get("init_args") or {})
    for key, value in changes.items():
        if key.startswith(f"{ARGS}."):
            arguments[key.removeprefix(f"{ARGS}.")] = value
    return {**strategy, "init_args": arguments}
