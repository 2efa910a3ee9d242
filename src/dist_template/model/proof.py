"""Which transformers models train under which strategies to the numbers of one process.

`verdict` asks, in this order: has the project proven the model itself; is its type in the table; is
a variant with its switches refused, or every variant; are the libraries those of the table; is each
of its switches in a variant that is right.

`proof.json` is the result of `python -m zoo`: small odd models of each type, against one
process. A project adds what `rehearse` has proven there, in its own proven.json. Per type:

    variants    [{"switches": {field: value}, "right": [axes], "refused": {axes: why}}], the first
                with the defaults
    leaks       the first layer in which a token depends on another document of its row
                ("documents"), or on where in the row its document is ("place")
    not_run     why it does not train on one process

Axes are the dimensions of a strategy that are larger than one, such as "fsdp+tp"; a training with
adapters has them before these: "lora+fsdp+tp" (`axes_of`)."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..parallel.spec import spec_of
from ..records import read_mapping, write_atomically
from .training_module import NOT_DECISIVE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["remember"]

PACKAGES = ("transformers", "torch")  # another release of one may change what a model computes
LAYERS = ("layer_types", "layers_block_type")
OF_MODELS = ("tp", "fsdp+ep", "fsdp+cp", "pp")  # whose result depends on what a model computes
# Numbers that switch a part of the model on, where they are not null, 0 or, as a factor, 1.
NUMBERS = re.compile(
    r"clip_qkv|gradient_clipping|.*soft_?cap(ping)?|sliding_window|q_lora_rank|swiglu_limit|"
    r".*_multiplier|logit_scale|logits_scaling|softmax_scale|.*_scaling_factor|"
    r"route_scale|activation_sparsity_pattern"
)
FILE = "proven.json"


class Verdict(NamedTuple):
    """`why` is empty where the model is proven."""

    kind: Literal["proven", "refused", "unproven"]
    why: str = ""


def verdict(config: PreTrainedConfig | None, axes: str, project: Path | None = None) -> Verdict:
    """Returns what is known of a model under the axes of a strategy and adapters; `project` is the
    folder with the project's own proofs, `config` is transformers', None for another kind of
    model."""
    if not axes:
        return Verdict("proven")
    if config is None:
        return Verdict("unproven", "a model that is not built from a transformers configuration")
    if project and _entry(config, axes) in _content(project).get("proven", []):
        return Verdict("proven")
    table, kind = _table(), config.model_type
    found = table["models"].get(kind, {})
    variants = found.get("variants")
    if not variants:
        why = f": {found['not_run']}" if "not_run" in found else ""
        return Verdict("unproven", f"a model of type {kind!r}{why}")
    switches = switches_of(config)
    why = _refusal_of([each for each in variants if each["switches"] == switches], axes)
    if not why:
        why = _always_refused(variants, axes)
    if why:
        return Verdict("refused", why)
    if table["versions"] != versions():
        names = ", ".join(f"{name} {number}" for name, number in versions().items())
        proven = ", ".join(table["versions"].values())
        return Verdict("unproven", f"{names} (the table has {proven})")
    first, *others = variants
    if axes not in first["right"]:
        return Verdict("unproven", f"a model of type {kind!r} under {axes}")
    needed = _of_models(axes)
    right = [first] + [variant for variant in others if needed.issubset(variant["right"])]
    unproven = []
    for name, value in switches.items():
        if value in [variant["switches"].get(name) for variant in right]:
            continue
        if NUMBERS.fullmatch(name):
            # A number decides by itself, whatever the other switches are.
            same = [variant for variant in variants if variant["switches"].get(name) == value]
            why = _refusal_of(same, axes)
            if why:
                return Verdict("refused", why)
            value = getattr(config.get_text_config(), name)
        unproven.append(f"{name} {json.dumps(value)} of type {kind!r} under {axes}")
    if unproven:
        return Verdict("unproven", unproven[0])
    return Verdict("proven")


def _refusal_of(variants: list[dict[str, Any]], axes: str) -> str:
    """Returns why the first of some tried variants fails under `axes` or a part of them; "" if none
    is known to fail."""
    for variant in variants:
        if axes in variant["right"]:
            continue
        for refused, why in variant["refused"].items():
            if _is_part(refused, axes):
                return why
    return ""


def _is_part(some: str, axes: str) -> bool:
    """Returns whether `axes` has all of `some`: "fsdp" is a part of "fsdp+tp"."""
    return set(axes.split("+")).issuperset(some.split("+"))


def _of_models(axes: str) -> set[str]:
    """Returns the axes within `axes` whose result depends on what a model computes."""
    return {each for each in OF_MODELS if _is_part(each, axes)}


def _always_refused(variants: list[dict[str, Any]], axes: str) -> str:
    """Returns why each tried variant fails under `axes` or a part of them; "" if one is right.
    Switches that were not tried are assumed to fail, too."""
    right: set[str] = set()
    for variant in variants:
        right.update(variant["right"])
    for variant in variants:
        for refused, why in variant["refused"].items():
            if _is_part(refused, axes) and not right & {axes, refused, *_of_models(refused)}:
                return why
    return ""


def leaks(config: PreTrainedConfig) -> dict[str, str]:
    """Returns where tokens depend on other documents; {} if nowhere."""
    return _table()["models"].get(config.model_type, {}).get("leaks", {})


def remember(
    package: Path,
    config: PreTrainedConfig | None = None,
    strategy: Any = "auto",
    world_size: int = 1,
    module: object = None,
    waits: list[str] | None = None,
) -> Path | None:
    """Adds a model, `trainer.strategy` and the adapters of `module` to what the project of
    `package` has proven; with `waits`, that its code ran on fake GPUs, and which lines wait.
    Returns the file; None if there is nothing to add."""
    content, axes = _content(package.parent), axes_of(strategy, world_size, module)
    if config is not None and axes:
        content["proven"] = [*content.get("proven", []), _entry(config, axes)]
    elif waits is None:
        return None
    if waits is not None:
        content["gpu"] = {"code": _code(package), "waits": waits}
    write_atomically(package.parent / FILE, json.dumps(content, indent=1) + "\n")
    return package.parent / FILE


def waits_of(package: Path) -> list[str] | None:
    """Returns the lines of a project's package that wait for a GPU in each step, by `rehearse
    --gpu`; None: it was not run, or the code has changed."""
    found = _content(package.parent).get("gpu")
    if not found or found["code"] != _code(package):
        return None
    return found["waits"]


def _code(package: Path) -> str:
    texts = [path.read_bytes() for path in sorted(package.rglob("*.py"))]
    return hashlib.blake2b(b"\0".join(texts), digest_size=8).hexdigest()


def versions() -> dict[str, str]:
    """Returns the versions for which a proof holds."""
    return {name: metadata.version(name).partition("+")[0] for name in PACKAGES}


def switches_of(config: PreTrainedConfig) -> dict[str, object]:
    """Returns the fields that switch parts of the model on and off, whether numbers are on that do
    so, and the kinds of its layers."""
    switches: dict[str, object] = {}
    for name, value in sorted(vars(config.get_text_config()).items()):
        if isinstance(value, bool) and not NOT_DECISIVE.fullmatch(name):
            switches[name] = value
        elif NUMBERS.fullmatch(name):
            switches[name] = is_on(value)
        if name in LAYERS and value:
            switches[name] = sorted({str(each) for each in value})
    return switches


def is_on(value: object) -> bool:
    """Whether a number of a configuration changes what its model computes."""
    if isinstance(value, list):
        return any(value)
    return value not in (None, 0, 1)


def axes_of(strategy: Any, world_size: int, module: object = None) -> str:
    """Returns the adapters of `module` and a strategy's dimensions above one, joined by "+"."""
    if world_size == 1:
        return ""
    adapters = getattr(module, "adapter_axes", [])
    return "+".join([*adapters, *spec_of(strategy).axes(world_size)])


@cache
def _table() -> dict[str, Any]:
    return read_mapping(Path(__file__).parents[1] / "proof.json", "install the library again")


def _content(project: Path) -> dict[str, Any]:
    path = project / FILE
    if not path.exists():
        return {}
    return read_mapping(path, "delete it")


def _entry(config: PreTrainedConfig, axes: str) -> dict[str, object]:
    return {
        "type": config.model_type,
        "switches": switches_of(config),
        "axes": axes,
        "versions": versions(),
    }
