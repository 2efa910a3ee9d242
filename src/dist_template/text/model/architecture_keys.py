"""Checks that the configuration class of `model.architecture`, or its model, reads each key.

transformers keeps any other key as an attribute, so a misspelt one would have no effect. Keys under
`extra`, for a model of your own, are passed to the configuration unchecked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EXTRA = "extra"


def checked_fields(architecture: Mapping[str, object]) -> dict[str, object]:
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
        known = {field.name for field in dataclasses.fields(config_class)}
        if fields.keys() - known:  # reading the code takes longer than the rest of the check
            known |= _names_in_code(config_class)
        for key in sorted(fields.keys() - known):
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}? A" if near else "a"
            raise InputError(
                f"model.architecture.{key} is no field of {config_class.__name__}: {hint} key that"
                f" only your own model reads goes under model.architecture.{EXTRA}"
            )
    return fields | extra


@cache
def _names_in_code(config_class: type[PreTrainedConfig]) -> set[str]:
    """Returns a configuration's aliases, properties, defaults and accepted older names, and the
    keys that only the model's code reads: Qwen3-MoE's `head_dim` is no field in transformers 5.23.
    """
    known = config_class.attribute_map.keys() | set(config_class.attribute_map.values())
    # some classes refuse their defaults, each in its own way
    with contextlib.suppress(Exception):
        known |= vars(config_class()).keys()
    for base in config_class.__mro__:
        if base.__module__.startswith("transformers."):
            known |= {key for key, value in vars(base).items() if isinstance(value, property)}
            known |= set(re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', inspect.getsource(base)))
    model = find_spec(config_class.__module__.replace(".configuration_", ".modeling_"))
    if model and model.origin:
        code = Path(model.origin).read_text(encoding="utf-8")
        known |= set(re.findall(r'\bconfig(?:\.|, ")(\w+)', code))
    return known
