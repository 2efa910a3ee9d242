"""What hooks add to a checkpoint is read back as what it was, or refused with its key."""

import functools
import io
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dist_template import InputError
from dist_template.checkpoint.plain_types import back, plain


class Colour(Enum):
    RED = 1


class Level(IntEnum):
    HIGH = 3


class Mode(StrEnum):
    FAST = "fast"


class Text(str, Enum):  # noqa: UP042 (as written before Python 3.11)
    LONG = "long"


@dataclass
class Best:
    score: float
    steps: list[int]


class Pair(NamedTuple):
    one: int
    two: int


READ_BACK: dict[str, Any] = {
    "numbers": [1, 2.5, 1j, True, None, "text", b"bytes", bytearray(b"more")],
    "numpy numbers": (np.float64(0.1), np.int32(3), np.bool_(True), np.float16(2), np.str_("a")),
    "enums that are numbers or texts": [Level.HIGH, Mode.FAST, Text.LONG],
    "times": [datetime(2026, 1, 2, 3, tzinfo=UTC), date(2026, 1, 2), timedelta(1, 2, 3)],
    "deque": deque([1, np.float32(2)], maxlen=4),
    "defaultdict": defaultdict(list, {"a": [np.int64(1)]}),
    "nested": defaultdict(dict, {"a": {"b": deque([Path("x")])}}),
    "ordered": OrderedDict([("b", Path("/tmp")), ("a", np.int8(1))]),
    "counter": Counter("aab"),
    "sets": {"paths": {Path("a"), Path("b")}, "frozen": frozenset({(1, np.int64(2))})},
    "keys": {Path("a"): 1, (1, 2): 2, np.int64(3): 3, None: 4},
    "ordered by paths": {"of": OrderedDict({Path("b"): 1, Path("a"): 2})},
    "namespace": Namespace(rate=np.float32(0.5), more=Namespace(paths=[Path("a")])),
    "range": range(1, 9, 2),
    "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    "a text that is like ours": {"dist_template.type": "path"},
}


def through(value: Any) -> Any:
    """Through a file that is read as data."""
    file = io.BytesIO()
    torch.save(plain({"own": value}), file)
    file.seek(0)
    return back(torch.load(file, weights_only=True))["own"]


@pytest.mark.parametrize("name", READ_BACK)
def test_a_value_is_read_back(name: str) -> None:
    value = READ_BACK[name]
    found = through(value)
    assert found == value and type(found) is type(value)
    if isinstance(value, deque):
        assert found.maxlen == value.maxlen
    if isinstance(value, defaultdict):
        assert found.default_factory is value.default_factory


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3)),
        np.array(2.5),
        np.arange(6, dtype=">i4").reshape(2, 3)[::-1],
        np.array([1 + 2j]),
        np.array([True, False]),
        np.array([["a", "bcd"]]),
        np.arange(3, dtype=np.uint16),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_array_is_read_back(array: np.ndarray) -> None:
    found = through(array)
    assert found.shape == array.shape and found.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(found, array)


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Best(0.5, [1]),
        Pair(1, 2),
        lambda: 0,
        functools.partial(torch.optim.AdamW, lr=1e-3),
        torch.nn.ReLU,
        torch.nn.ReLU(),
        torch.Generator(),
        np.random.default_rng(0),
        np.array([object()]),
        np.datetime64("2026-01-02"),
        np.arange(2, dtype=np.longdouble),
        defaultdict(lambda: 0),
    ],
    ids=lambda value: getattr(type(value), "__name__", "value"),
)
def test_what_cannot_be_read_back_is_refused_with_its_key(value: Any) -> None:
    with pytest.raises(InputError, match=r"at own\.deep\.0, .*ignore=.*add_safe_globals"):
        plain({"own": {"deep": [value]}})


def test_a_class_that_its_author_allows_is_read_back() -> None:
    with torch.serialization.safe_globals([Best, Colour, Pair]):
        assert through([Best(0.5, [1]), Colour.RED, Pair(1, 2)]) == [
            Best(0.5, [1]),
            Colour.RED,
            Pair(1, 2),
        ]


def test_a_view_is_saved_without_the_tensor_behind_it() -> None:
    big = torch.arange(1_000_000.0)
    file = io.BytesIO()
    torch.save(plain({"own": big[5:7]}), file)
    assert file.tell() < 10_000
    assert through(big[5:7]).tolist() == [5.0, 6.0]
