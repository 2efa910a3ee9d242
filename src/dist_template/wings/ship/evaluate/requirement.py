"""Requirements on comparisons, for CI: `eval/loss better`, `accuracy not worse by 0.01`."""

from __future__ import annotations

import re

from ....errors import InputError
from .paired import Comparison

SYNTAX = re.compile(r"(\S+) (better|not worse by (\d*\.?\d+))")


def parse(text: str) -> tuple[str, float | None]:
    """Returns the measure's name, and by how much it may be worse; None: it must be better."""
    if not (found := SYNTAX.fullmatch(text.strip())):
        allowed = "'MEASURE better' or 'MEASURE not worse by 0.01', such as 'eval/loss better'"
        raise InputError(f"--require {text!r} is no requirement: write {allowed}")
    return found[1], float(found[3]) if found[3] else None


def failure(text: str, comparisons: list[Comparison]) -> str | None:
    """Returns why a requirement does not hold, in one sentence; None: it holds.

    Raises:
        InputError: its measure was not compared, or a task has to be named.
    """
    given, margin = parse(text)
    name = re.sub("^(eval|test)/", "", given)
    found = [c for c in comparisons if name == c.name or c.name.endswith(f"/{name}")]
    if len(found) != 1:
        known = ", ".join(each.name for each in comparisons)
        why = "other tokens cannot be compared" if name == "loss" else "it is not one measure"
        raise InputError(f"--require {text!r}: {why}; give one of {known}")
    (each,) = found
    worse = each.high if each.lower_is_better else -each.low
    holds = each.verdict == "better" if margin is None else worse <= margin
    return None if holds else f"required {text!r}, but {each.sentence}"
