"""Runs every rule over a run's history.

A rule is a function of a `History` that yields `Finding`s, with `@rule` above it, in a module that rules/__init__.py
names. One that lacks what it needs yields nothing: too few steps, a metric that was not logged, a fact that is not
known. What a rule compares with is a constant beside it, with its reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

from ...errors import first_line
from ..history.run import History
from .finding import LEVELS, Finding
from .rules import ORDER

Rule = Callable[[History], Iterable[Finding]]

RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Have `diagnose` ask it, under its name."""
    RULES[str(getattr(function, "__name__", function))] = function
    return function


def diagnose(history: History) -> list[Finding]:
    """What is wrong with a run: the worst first, of equally bad ones the surest. [] where nothing is.

    A finding that another one, at least as bad, explains is left out. A rule that raises is a finding of its own: it
    must not end a training.
    """
    for name in ORDER:
        importlib.import_module(f"{__package__}.rules.{name}")
    found: list[Finding] = []
    for name, function in RULES.items():
        try:
            found += function(history)
        except Exception as error:  # of a rule, in whatever way it is wrong
            what = f"{type(error).__name__}: {first_line(error)}"
            found.append(Finding(name, "info", "certain", f"the rule {name} failed", f"It raised {what}."))
    explained = {(other, LEVELS.index(each.level)) for each in found for other in each.explains}
    kept = [
        each
        for each in found
        if not any(each.rule == other and level <= LEVELS.index(each.level) for other, level in explained)
    ]
    return sorted(kept, key=lambda each: each.weight)
