"""Checks the keys of `model.architecture`: the configuration class of its `model_type` or its model
must read them.

transformers keeps any other key as an attribute that no model reads, so a misspelt one would have
no effect. Keys for a model of your own are given under `extra`; they are passed to the
configuration unchecked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import InputError

EXTRA = "extra"


def checked_fields(architecture: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a configuration, with those of `extra` and without `model_type`.

    Raises:
        InputError: neither the configuration class nor the model reads such a key.
    """
    from transformers import CONFIG_MAPPING

    fields = {key: value for key, value in architecture.items() if key not in ("model_type", EXTRA)}
    extra = architecture.get(EXTRA) or {}
    if not isinstance(extra, dict):
        raise InputError(f"model.architecture.{EXTRA} is {extra!r}; give keys and their values")
    kind = architecture.get("model_type", "")
    if not isinstance(kind, str):
        raise InputError(f"model.architecture.model_type is {kind!r}; give a name, such as llama")
    if kind in CONFIG_MAPPING:  # an unknown type is refused by transformers
        config_class = CONFIG_MAPPING[kind]
        declared = {field.name for field in dataclasses.fields(config_class)}
        # Reading the code for more names costs more than the rest of the check.
        known = _known(config_class) if fields.keys() - declared else declared
        for key in sorted(fields.keys() - known):
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}? A" if near else "a"
            raise InputError(
                f"model.architecture.{key} is no field of {config_class.__name__}: {hint} key that"
                f" only your own model reads goes under model.architecture.{EXTRA}"
            )
    return fields | extra


@cache
def _known(config_class: Any) -> set[str]:
    """Returns a configuration's fields, aliases, properties, defaults and accepted older names.

    The keys that only the model's code reads are included: Qwen3-MoE's `head_dim` is no field in
    transformers 5.23.
    """
    classes = [one for one in config_class.__mro__ if one.__module__.startswith("transformers.")]
    known = {field.name for field in dataclasses.fields(config_class)}
    known |= config_class.attribute_map.keys() | set(config_class.attribute_map.values())
    # of some classes the defaults are refused, each in its own way
    with contextlib.suppress(Exception):
        known |= vars(config_class()).keys()
    known |= {
        name for one in classes for name, value in vars(one).items() if isinstance(value, property)
    }
    for one in classes:
        known |= set(re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', inspect.getsource(one)))
    model = find_spec(config_class.__module__.replace(".configuration_", ".modeling_"))
    if model and model.origin:
        code = Path(model.origin).read_text(encoding="utf-8")
        known |= set(re.findall(r'\bconfig(?:\.|, ")(\w+)', code))
    return known
