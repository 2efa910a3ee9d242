"""Sets attributes of other libraries' objects: for a while, or in place of a method."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Generator[None]:
    """Inside, `owner` has these attributes; afterwards the ones that it had before.

    Raises:
        AttributeError: `owner` has no such attribute, so that another version of its library would
            not read it.
    """
    before = {name: getattr(owner, name) for name in values}
    own = {name for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if name in own:
                setattr(owner, name, value)
            else:  # it was its class's
                delattr(owner, name)


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a method of this instance by `wrapper`, which gets the method before its arguments.

    The class, its names and an instance's hooks stay. nn.Module calls `self.forward` (torch 2.13),
    Lightning `module.configure_model` (2.6): both read the instance first."""
    method = getattr(owner, name)
    setattr(owner, name, wraps(method)(partial(wrapper, method)))
