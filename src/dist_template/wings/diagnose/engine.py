"""Runs all rules over the history of a run.

A rule is a function of a `History` that yields `Finding`s: those that rules/__init__.py lists, and
entry points of the group `dist_template.rules`, which are reported after them. A rule yields
nothing if its data are missing: too few steps, a metric or a fact that was not recorded.
Each threshold is a constant next to its rule, with the reason for its value."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial

from ...errors import first_line
from ...plugins import Plugin, PluginError, contained, registered
from ..history import History
from .finding import LEVELS, Change, Finding, as_text
from .rules import ALL

Rule = Callable[[History], Iterable[Finding]]

RULES: dict[str, Rule] = {rule.__name__: rule for rule in ALL}
GROUP = "dist_template.rules"
MISSING = object()  # is no value of a configuration


@cache
def registered_rules() -> dict[str, Rule]:
    """Returns the rules of other packages; each is imported when it is called."""
    rules: dict[str, Rule] = {}
    for name, point in registered(GROUP, taken=RULES).items():
        rules[name] = partial(_findings_of, point)
    return rules


def _findings_of(plugin: Plugin, history: History) -> list[Finding]:
    """Returns what a registered rule yields; raises what it raises, as a PluginError."""
    rule = plugin.load()
    if plugin.is_ours:
        return list(rule(history))
    with contained(plugin, "fails"):
        found = list(rule(history))
        for each in found:
            if not isinstance(each, Finding) or each.level not in LEVELS:
                raise TypeError(f"it yields {each!r:.100}, which is no Finding of a known level")
            as_text([each])
            json.dumps(each.as_dict())
    return found


def diagnose(history: History) -> list[Finding]:
    """Returns the findings, sorted by level, then by confidence, then in the order of the rules. A
    finding is dropped if another one of the same or a higher level explains it. A rule that raises
    becomes a finding of level info, because it must not end a training."""
    found: list[Finding] = []
    for name, rule in (RULES | registered_rules()).items():
        try:
            found += rule(history)
        except Exception as error:  # a rule may fail in any way
            raised = f"It raised {type(error).__name__}: {first_line(error)}."
            if isinstance(error, PluginError):
                raised = f"{error}."
            found.append(Finding(name, "info", "certain", f"the rule {name} failed", raised))
    # Rule: index of the most severe level of the findings that explain it.
    explained: dict[str, int] = {}
    for finding in found:
        for other in finding.explains:
            level = LEVELS.index(finding.level)
            explained[other] = min(level, explained.get(other, len(LEVELS)))
    kept = []
    for finding in found:
        if LEVELS.index(finding.level) < explained.get(finding.rule, len(LEVELS)):
            finding = applicable(finding, history)
            kept.append(without_settings_in_effect(finding, history))
    return sorted(kept, key=lambda finding: finding.weight)


def without_settings_in_effect(finding: Finding, history: History) -> Finding:
    """Drops changes to the values that the run has already, and causes all of whose changes it has:
    they have not helped."""

    def is_new(change: Change) -> bool:
        return change.key == "config" or history.key(change.key, MISSING) != change.to

    causes = []
    for cause in finding.causes:
        changes = list(filter(is_new, cause.changes))
        if changes or not cause.changes:
            causes.append(replace(cause, changes=changes))
    return replace(finding, causes=causes)


KEY = re.compile(r"\b(?:model|data)(?:\.[a-z]\w*)+")  # that a sentence names


def applicable(finding: Finding, history: History) -> Finding:
    """Drops changes of keys that the run's module or data module does not have, and causes whose
    sentence names such a key. A module of a user's has the keys of its own arguments alone."""
    if history.is_text:
        return finding
    causes = []
    for cause in finding.causes:
        if all(map(history.has_key, KEY.findall(cause.sentence))):
            changes = [each for each in cause.changes if history.has_key(each.key)]
            causes.append(replace(cause, changes=changes))
    return replace(finding, causes=causes)
