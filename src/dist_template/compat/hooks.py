"""What loop.py asks of a hook of Lightning's: whether somebody has it; and how a module's is
called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def own(owner: Any, name: str, base: type) -> Any:
    """The hook `name` of `owner`, None where it is the empty one of `base`."""
    hook = getattr(owner, name)
    return None if getattr(hook, "__func__", None) is getattr(base, name) else hook


def call(module: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Inside, `self.log` knows which hook it is called in."""
    before, vars(module)["_current_fx_name"] = module._current_fx_name, name
    output = function(*args)
    vars(module)["_current_fx_name"] = before
    return output
