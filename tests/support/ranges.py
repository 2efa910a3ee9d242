"""The ranges that the arguments of a project's configuration declare, by key."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

import lightning as L

from dist_template.cli.defaults import always_on
from dist_template.cli.ranges import alternatives, arguments_of
from dist_template.cli.run import run_section
from dist_template.cluster.site import Site
from dist_template.compat import ranges as of_others
from dist_template.ranges import Range
from tests.support.line import OURS

Checks = list[Range]


def numbers(hint: Any, key: str) -> Iterator[tuple[str, Checks]]:
    """Each key of a type that takes a number, with its ranges; in dataclasses, lists and unions."""
    for kind, checks in alternatives(hint):
        if kind in (int, float):
            yield key, [each for each in checks if isinstance(each, Range)]
        elif is_dataclass(kind):
            for name, each in arguments_of(kind).items():
                yield from numbers(each, f"{key}.{name}")
        elif get_origin(kind) is not Literal:
            for each in get_args(kind):
                yield from numbers(each, key)


def sections() -> dict[str, type]:
    """The class of each section of the linked project's configuration."""
    OURS.start()
    found: dict[str, type] = {"trainer": L.Trainer, "run": run_section(), "cluster": Site}
    found["model"], found["data"] = OURS.class_of(OURS.module), OURS.class_of(OURS.data)
    return found | {key: plugin.load() for key, plugin in always_on().items()}


def ranges() -> dict[str, Checks]:
    """The keys that take a number, with what their types declare; [] where that is nothing."""
    found: dict[str, Checks] = {}
    arguments = [
        (f"{section}.{name}", hint)
        for section, kind in sections().items()
        for name, hint in arguments_of(kind).items()
    ]
    for key, hint in [*arguments, *of_others.KEYS.items()]:
        for name, checks in numbers(hint, key):
            if checks or name not in found:
                found[name] = checks
    return found


def accepts(checks: Checks, value: float) -> bool:
    return all(each.accepts(value) for each in checks)
