"""Finds the hooks of Lightning that an object overrides, and calls a module's hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def overridden_hook(owner: Any, name: str, base: type) -> Any:
    """Returns the hook `name` of `owner`, or None if it is the empty one of `base`."""
    hook = getattr(owner, name)
    return None if getattr(hook, "__func__", None) is getattr(base, name) else hook


def call(module: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function`, in which `self.log` knows the hook's name."""
    before, vars(module)["_current_fx_name"] = module._current_fx_name, name
    output = function(*args)
    vars(module)["_current_fx_name"] = before
    return output
