"""Which transformers models train under which strategies to the numbers of one process.

`proof.json` is the result of `python -m benchmarks zoo`: small odd models of each type, against one
process. Per type:

    variants    [{"switches": {field: value}, "right": [axes], "refused": {axes: why}}], the first with the defaults
    leaks       the first layer in which a token depends on another document of its row ("documents")
    not_run     why it does not train on one process

Axes are the dimensions of a strategy that are larger than one, such as "fsdp+tp"; a training with
adapters has them before these: "lora+fsdp+tp" (`axes_of`).
"""

from __future__ import annotations

import json
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..parallel import sharding_of
from ..records import read_mapping
from .training_module import NOT_DECISIVE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PACKAGES = ("transformers", "torch")  # another release of one may change what a model computes
LAYERS = ("layer_types", "layers_block_type")


class Verdict(NamedTuple):
    """`why` is empty where the model is proven."""

    kind: Literal["proven", "refused", "unproven"]
    why: str = ""


def verdict(config: PreTrainedConfig | None, axes: str) -> Verdict:
    """Returns what is known of a model under a strategy.

    Args:
        config: The transformers configuration; None for another kind of model.
        axes: Of the strategy and the adapters (`axes_of`); "" on one process."""
    if not axes:
        return Verdict("proven")
    if config is None:
        return Verdict("unproven", "a model that is not built from a transformers configuration")
    table, kind, parts = _table(), config.model_type, set(axes.split("+"))
    found = table["models"].get(kind, {})
    variants = found.get("variants")
    if not variants:
        why = f": {found['not_run']}" if "not_run" in found else ""
        return Verdict("unproven", f"a model of type {kind!r}{why}")
    switches = switches_of(config)
    for variant in variants:
        if variant["switches"] == switches and axes not in variant["right"]:
            for refused, why in variant["refused"].items():
                if parts.issuperset(refused.split("+")):
                    return Verdict("refused", why)
    if table["versions"] != versions():
        names = ", ".join(f"{name} {number}" for name, number in versions().items())
        proven = ", ".join(table["versions"].values())
        return Verdict("unproven", f"{names} (the table has {proven})")
    if axes not in variants[0]["right"]:
        return Verdict("unproven", f"type {kind!r} under {axes}")
    for name, value in switches.items():
        if value not in [variant["switches"].get(name) for variant in variants]:
            return Verdict("unproven", f"{name} {json.dumps(value)} of type {kind!r} under {axes}")
    return Verdict("proven")


def leaks(config: PreTrainedConfig) -> dict[str, str]:
    """Returns where tokens depend on other documents; {} if nowhere."""
    return _table()["models"].get(config.model_type, {}).get("leaks", {})


def versions() -> dict[str, str]:
    """Returns the versions for which a proof holds."""
    return {name: metadata.version(name).partition("+")[0] for name in PACKAGES}


def switches_of(config: PreTrainedConfig) -> dict[str, object]:
    """Returns the fields that switch parts of the model on and off, and the kinds of its layers."""
    switches: dict[str, object] = {}
    for name, value in sorted(vars(config.get_text_config()).items()):
        if isinstance(value, bool) and not NOT_DECISIVE.fullmatch(name):
            switches[name] = value
        if name in LAYERS and value:
            switches[name] = sorted({str(each) for each in value})
    return switches


def axes_of(strategy: Any, world_size: int, module: object = None) -> str:
    """Returns the adapters of `module` and a strategy's dimensions above one, joined by "+"."""
    if world_size == 1:
        return ""
    adapters = getattr(module, "adapter_axes", [])
    return "+".join([*adapters, *sharding_of(strategy).axes(world_size)])


@cache
def _table() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "proof.json"
    return read_mapping(path, "install the library again")
