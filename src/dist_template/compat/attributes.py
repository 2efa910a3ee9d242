"""Sets attributes of other libraries' objects for a while, and restores them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
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
