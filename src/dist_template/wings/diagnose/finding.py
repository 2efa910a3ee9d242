"""The result of a rule, and its text for a terminal."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["info", "warning", "error"]
Identity = tuple[str, str, tuple[int, ...]]  # rule, level, ranks
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
    now: object
    to: object
    saves_gib: float | None = None
    note: str = ""

    @property
    def flag(self) -> str:
        """The flag to type."""
        return f"--{self.key} {shlex.quote(_as_yaml(self.to))}"

    @property
    def remark(self) -> str:
        parts = []
        if self.now is not None:
            parts.append(f"now {_as_yaml(self.now)}")
        if self.saves_gib is not None:
            parts.append(f"frees {self.saves_gib:.1f} GiB")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts)


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
    def identity(self) -> Identity:
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
            parts.append(f"steps {first} to {last}" if first < last else f"step {first}")
        if self.ranks:
            parts.append(f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}")
        return ", ".join(parts)

    @property
    def line(self) -> str:
        """One line: the problem, and the first flag to try."""
        line = f"{self.level}: {self.title} ({self.where})"
        if self.causes and self.causes[0].changes:
            line += f"; try {self.causes[0].changes[0].flag}"
        return line

    def as_dict(self) -> dict[str, Any]:
        """Returns plain types for JSON; each change includes its flag."""
        plain = asdict(self)
        del plain["explains"]
        for cause, plain_cause in zip(self.causes, plain["causes"], strict=True):
            for change, plain_change in zip(cause.changes, plain_cause["changes"], strict=True):
                plain_change["flag"] = change.flag
        return plain


def counted(findings: Sequence[Finding]) -> str:
    """Returns "1 error, 2 warnings, 3 infos"."""
    counts = Counter(finding.level for finding in findings)
    parts = []
    for level in LEVELS:
        if counts[level]:
            parts.append(f"{counts[level]} {level}{'s' * (counts[level] > 1)}")
    return ", ".join(parts)


def as_text(findings: Sequence[Finding], num: int | None = None) -> str:
    """Formats the first `num` findings in full, each with its likeliest causes, and lists the
    titles of the others. None: all findings with all causes.
    """
    parts = []
    for finding in findings[:num]:
        lines = [f"{finding.level.upper():<8} {finding.title} ({finding.where})"]
        lines += _wrapped(finding.evidence, " " * 9)
        causes = finding.causes if num is None else finding.causes[:NUM_CAUSES]
        for number, cause in enumerate(causes, start=1):
            lines += _wrapped(cause.sentence, f"      {number}. ")
            for change in cause.changes:
                lines.append(f"            {change.flag:<44}  {change.remark}".rstrip())
        parts.append("\n".join(lines))
    if num is not None and len(findings) > num:
        rest = [f"   {finding.level}: {finding.title}" for finding in findings[num:]]
        parts.append("\n".join(["And:", *rest]))
    return "\n\n".join(parts)


def _wrapped(text: str, start: str) -> list[str]:
    indent = " " * len(start)
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=indent, break_long_words=False)


def _as_yaml(value: object) -> str:
    """Formats a value as YAML on one line."""
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if isinstance(value, float) else json.dumps(value)
