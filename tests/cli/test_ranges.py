"""Numbers: every numeric key has a range, and what is outside of it is refused before anything is built."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any, get_args, get_type_hints

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy

from dist_template.cli.fit import CLI
from dist_template.strategies import MeshStrategy
from dist_template.text import Source, TokenizerSpec
from tests.support.library import RANGES, keys_of
from tests.support.line import OURS
from tests.support.runs import run

# Lightning checks these itself, and most of them take -1, "auto" or null besides.
LIGHTNINGS = {
    *"max_epochs min_epochs max_steps min_steps max_time fast_dev_run overfit_batches precision".split(),
    *"limit_val_batches limit_test_batches limit_predict_batches".split(),
    *"plugins accumulate_grad_batches".split(),
}
MESH = {
    f"trainer.strategy.{name}" for name in signature(MeshStrategy).parameters
}  # it refuses its own sizes
CHECKED = {
    "preemption.max_time", "data.source.weights", "data.source.schedule",
    "data.tokenizer.vocab_size",
}  # fmt: skip
WITHOUT = {f"trainer.{name}" for name in LIGHTNINGS} | CHECKED | MESH
CLASSES = {  # what `class_path` names
    "data.source": Source, "data.tokenizer": TokenizerSpec, "trainer.strategy": Strategy, "trainer.logger": Logger
}  # fmt: skip


class Parsed(Exception):
    pass


def numeric(hint: Any, key: str) -> Iterator[str]:
    """Yields the keys of a type that take a number, in its dataclasses, lists and unions of numbers."""
    if hint in (int, float):
        yield key
    elif is_dataclass(hint):
        hints = get_type_hints(hint)
        for field in fields(hint):
            if field.init:
                yield from numeric(hints[field.name], f"{key}.{field.name}")
    for one in get_args(hint):
        yield from numeric(one, key)


def below(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("dist_template.") and "__init__" in vars(one):
            yield one
        yield from below(one)


@pytest.fixture
def parser(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def parse(self: Any, parser: Any, args: Any) -> None:
        raise Parsed(self._subcommand_parsers["fit"])

    monkeypatch.setattr(CLI, "parse_arguments", parse)
    OURS.start()
    with pytest.raises(Parsed) as parsed:
        CLI(OURS, ["fit", *flags], run=True)
    return parsed.value.args[0]


def test_every_numeric_key_has_a_range_that_its_default_is_in(parser: Any) -> None:
    """A number in a class of `class_path` is checked by that class."""
    found = set()
    for action in keys_of(parser):
        hint = getattr(action, "_typehint", None) or action.type
        if hint is not None and not action.dest.endswith(".help"):
            found |= {*numeric(hint, action.dest)} - WITHOUT
        default = action.default
        for value in default if isinstance(default, tuple) else [default]:
            if action.dest in RANGES and isinstance(value, int | float):
                assert RANGES[action.dest][1] <= value <= RANGES[action.dest][2], action.dest
    for section, base in CLASSES.items():
        for kind in below(base):
            for name, hint in get_type_hints(kind.__init__).items():
                found |= {*numeric(hint, f"{section}.{name}")} - WITHOUT
    assert found == {
        key for key in RANGES if not key.startswith(("lr_scheduler.", "optimizer."))
    }  # of torch's classes
    assert all(math.isfinite(least) and math.isfinite(most) for _, least, most in RANGES.values())


class Grad(Callback):
    def __init__(self, value: float = float("nan"), patience: int = -(2**70)) -> None:
        assert math.isnan(value) and patience


def test_an_argument_of_a_users_class_has_no_range(flags: list[str]) -> None:
    assert run("fit", *flags, "--trainer.max_steps=1", f"--trainer.callbacks+={__name__}.Grad") == 0
