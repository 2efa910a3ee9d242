"""The result of a rule, and its text for a terminal."""

import shlex
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..values import shown

Level = Literal["info", "warning", "error"]
Confidence = Literal["certain", "likely"]

LEVELS = ("error", "warning", "info")
CONFIDENCE = ("certain", "likely")
WIDTH = 110  # characters of a line


@dataclass(frozen=True)
class Change:
    """A key and the value to set."""

    key: str  # as on the command line, without dashes; "config" adds a file
    now: object  # the value in this run; None: not set, or not known
    to: object  # the proposed value, computed from this run
    note: str = ""  # a remark of a few words

    @property
    def flag(self) -> str:
        """The flag to type."""
        return f"--{self.key} {shlex.quote(shown(self.to))}"

    @property
    def remark(self) -> str:
        now = "" if self.now is None else f"now {shown(self.now)}"
        return ", ".join(filter(None, [now, self.note]))


@dataclass(frozen=True)
class Cause:
    """A possible cause, in one sentence, and the changes to make together if it applies."""

    sentence: str
    changes: Sequence[Change] = ()


@dataclass(frozen=True)
class Finding:
    """One problem of a run."""

    rule: str  # a stable identifier
    # error: the run is worthless or will fail; warning: it loses time or quality, or is at risk
    level: Level
    confidence: Confidence  # certain: counted or measured; likely: a healthy run does not do this
    title: str  # what is wrong, in a few words, without figures
    evidence: str  # what was observed, in one or two sentences: values, steps, ranks
    causes: Sequence[Cause] = ()  # the likeliest first
    # The first and the last step that show it; None: it is not about steps.
    steps: tuple[int, int] | None = None
    ranks: Sequence[int] = ()  # that show it; (): all, or not known
    # rules whose findings are consequences, and dropped
    explains: Sequence[str] = field(default=(), compare=False)

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
            noun = "ranks" if len(self.ranks) > 1 else "rank"
            parts.append(f"{noun} {', '.join(map(str, self.ranks))}")
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
    """Returns "1 error, 2 warnings"."""
    parts = []
    for level, number in Counter(finding.level for finding in findings).items():
        plural = "s" if number > 1 else ""
        parts.append(f"{number} {level}{plural}")
    return ", ".join(parts)


def as_text(findings: Sequence[Finding]) -> str:
    """Formats findings with all their causes."""
    parts = []
    for finding in findings:
        lines = [f"{finding.level.upper():<8} {finding.title} ({finding.where})"]
        lines += _wrapped(finding.evidence, " " * 9)
        for number, cause in enumerate(finding.causes, start=1):
            lines += _wrapped(cause.sentence, f"      {number}. ")
            for change in cause.changes:
                lines.append(f"            {change.flag:<44}  {change.remark}".rstrip())
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _wrapped(text: str, start: str) -> list[str]:
    indent = " " * len(start)
    return textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=indent, break_long_words=False
    )
