"""Which of a test's parameters run in `make test`, and which in `make test-all` alone."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


def tiers(values: Iterable[Any], daily: Container[Any]) -> list[Any]:
    """Returns parameters: those in `daily` as they are, the others marked nightly."""
    return [value if value in daily else _nightly(value) for value in values]


def _nightly(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=NIGHTLY)
