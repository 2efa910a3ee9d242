"""The result of a rule, and its text for a terminal."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["info", "warning", "error"]
Confidence = Literal["certain", "likely"]

LEVELS = ("error", "warning", "info")
CONFIDENCE = ("certain", "likely")
WIDTH = 110  # characters of a line
NUM_IN_FULL = 4  # findings that are printed with their causes: as many as fit on a screen
NUM_CAUSES = 3  # causes that are printed per finding


@dataclass(frozen=True)
class Change:
    """A key and the value to set.

    Args:
        key: As on the command line, without dashes; "config" adds a file.
        now: The value in this run. None: not set, or not known.
        to: The proposed value, computed from this run.
        saves_gib: Device memory that the change frees.
        note: A remark of a few words.
    """

    key: str
    now: Any
    to: Any
    saves_gib: float | None = None
    note: str = ""

    @property
    def flag(self) -> str:
        """The flag to type."""
        return f"--{self.key} {shlex.quote(_as_yaml(self.to))}"

    @property
    def remark(self) -> str:
        parts = [f"now {_as_yaml(self.now)}"] if self.now is not None else []
        parts += [f"frees {self.saves_gib:.1f} GiB"] if self.saves_gib is not None else []
        return ", ".join([*parts, self.note] if self.note else parts)


@dataclass(frozen=True)
class Cause:
    """A possible cause, in one sentence, and the changes to make together if it applies."""

    sentence: str
    changes: Sequence[Change] = ()


@dataclass(frozen=True)
class Finding:
    """One problem of a run.

    Args:
        rule: A stable identifier.
        level: error: the run is worthless or will fail. warning: it loses time or quality, or is at
            risk. info: it could be better.
        confidence: certain: counted or measured. likely: a healthy run does not do this.
        title: What is wrong, in a few words, without figures.
        evidence: What was observed, in one or two sentences: values, steps, ranks.
        causes: The likeliest first.
        steps: First and last optimizer step that show it. None: it is not about steps.
        ranks: The ranks that show it. Empty: all, or not known.
        explains: Rules whose findings are consequences of this one; `engine.diagnose` drops them.
    """

    rule: str
    level: Level
    confidence: Confidence
    title: str
    evidence: str
    causes: Sequence[Cause] = ()
    steps: tuple[int, int] | None = None
    ranks: Sequence[int] = ()
    explains: Sequence[str] = field(default=(), compare=False)

    @property
    def identity(self) -> tuple[str, str, tuple[int, ...]]:
        """Equal for the same problem at a later step."""
        return self.rule, self.level, tuple(self.ranks)

    @property
    def weight(self) -> tuple[int, int]:
        """Sort key: the most severe finding has the lowest weight."""
        return LEVELS.index(self.level), CONFIDENCE.index(self.confidence)

    @property
    def where(self) -> str:
        """Confidence, steps and ranks: "likely, steps 20 to 40, rank 3"."""
        parts: list[str] = [self.confidence]
        if self.steps:
            first, last = self.steps
            parts.append(f"step {first}" if first == last else f"steps {first} to {last}")
        if self.ranks:
            parts.append(f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}")
        return ", ".join(parts)

    @property
    def line(self) -> str:
        """One line: the problem, and the first flag to try."""
        changes = self.causes[0].changes if self.causes else ()
        advice = f"; try {changes[0].flag}" if changes else ""
        return f"{self.level}: {self.title} ({self.where}){advice}"

    def as_dict(self) -> dict[str, Any]:
        """Returns plain types for JSON; each change includes its flag."""
        plain = {key: value for key, value in asdict(self).items() if key != "explains"}
        for cause, plain_cause in zip(self.causes, plain["causes"], strict=True):
            for change, plain_change in zip(cause.changes, plain_cause["changes"], strict=True):
                plain_change["flag"] = change.flag
        return plain


def as_text(findings: Sequence[Finding], full: bool = False) -> str:
    """Formats the first findings in full, and lists the titles of the others.

    Args:
        findings: In the order in which they are printed.
        full: Print all findings in full, with all causes.
    """
    num = len(findings) if full else NUM_IN_FULL
    parts = [_in_full(each, None if full else NUM_CAUSES) for each in findings[:num]]
    if rest := findings[num:]:
        parts.append("\n".join(["And:", *(f"   {each.level}: {each.title}" for each in rest)]))
    return "\n\n".join(parts)


def _in_full(finding: Finding, num_causes: int | None) -> str:
    lines = [f"{finding.level.upper():<8} {finding.title} ({finding.where})"]
    lines += _wrapped(finding.evidence, " " * 9)
    for number, cause in enumerate(finding.causes[:num_causes], start=1):
        lines += _wrapped(cause.sentence, f"      {number}. ")
        lines += [f"            {each.flag:<44}  {each.remark}".rstrip() for each in cause.changes]
    return "\n".join(lines)


def _wrapped(text: str, start: str) -> list[str]:
    indent = " " * len(start)
    return textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=indent, break_long_words=False
    )


def _as_yaml(value: Any) -> str:
    """Formats a value as YAML on one line."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) else json.dumps(value)
