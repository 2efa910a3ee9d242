"""What a rule has to say, and how it reads on a terminal and in Markdown."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["info", "warning", "error"]
Sure = Literal["certain", "likely", "possible"]

LEVELS = ("error", "warning", "info")
SURE = ("certain", "likely", "possible")
WIDTH = 110  # characters of a line
IN_FULL = 4  # findings told with their causes: what one screen holds
CAUSES = 3  # of them, unless everything is asked for


@dataclass(frozen=True)
class Change:
    """A key and the value to give it.

    Args:
        key: As on the command line without the dashes, "model.optim.learning_rate"; "config" adds a file.
        now: Its value in this run. None: not set, or not known.
        to: The proposed value, computed from this run.
        saves_gib: Memory of a device that it would free.
        note: What else to know, in a few words.
    """

    key: str
    now: Any
    to: Any
    saves_gib: float | None = None
    note: str = ""

    @property
    def flag(self) -> str:
        """What to type."""
        return f"--{self.key} {shlex.quote(_value(self.to))}"

    @property
    def remark(self) -> str:
        parts = [f"now {_value(self.now)}"] if self.now is not None else []
        parts += [f"frees {self.saves_gib:.1f} GiB"] if self.saves_gib is not None else []
        return ", ".join([*parts, self.note] if self.note else parts)


@dataclass(frozen=True)
class Cause:
    """Why it may be so.

    Args:
        sentence: Plain words.
        changes: What to do about it; all of them together.
    """

    sentence: str
    changes: Sequence[Change] = ()


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or could be better.

    Args:
        rule: Which rule found it; stable.
        level: error: the run is worthless or will not end well. warning: it loses time, or quality, or is in danger.
            info: it could be better.
        sure: How sure the rule is.
        title: What is wrong, in a few words without figures.
        evidence: What was seen, in a sentence or two: values, steps, ranks.
        causes: The likeliest first.
        steps: First and last optimizer step in which it was seen. None: it is not of steps.
        ranks: Which ranks. Empty: all, or not known.
        explains: Rules whose findings would only be this one's consequence; `engine.diagnose` leaves those out.
    """

    rule: str
    level: Level
    sure: Sure
    title: str
    evidence: str
    causes: Sequence[Cause] = ()
    steps: tuple[int, int] | None = None
    ranks: Sequence[int] = ()
    explains: Sequence[str] = field(default=(), compare=False)

    @property
    def identity(self) -> tuple[str, str, tuple[int, ...]]:
        """Equal for what is the same finding, seen again some steps later."""
        return self.rule, self.level, tuple(self.ranks)

    @property
    def weight(self) -> tuple[int, int]:
        """Lower is to be read first."""
        return LEVELS.index(self.level), SURE.index(self.sure)

    @property
    def where(self) -> str:
        """How sure, and of which steps and ranks: "likely, steps 20 to 40, rank 3"."""
        parts: list[str] = [self.sure]
        if self.steps:
            first, last = self.steps
            parts.append(f"step {first}" if first == last else f"steps {first} to {last}")
        if self.ranks:
            parts.append(f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}")
        return ", ".join(parts)

    @property
    def line(self) -> str:
        """All of it that fits in one line: what, and what to try first."""
        change = next((change for cause in self.causes[:1] for change in cause.changes), None)
        return f"{self.level}: {self.title} ({self.where})" + (f"; try {change.flag}" if change else "")

    def as_dict(self) -> dict[str, Any]:
        """Of plain types, for JSON; each change with its flag."""
        plain = {key: value for key, value in asdict(self).items() if key != "explains"}
        for cause, told in zip(self.causes, plain["causes"], strict=True):
            for change, each in zip(cause.changes, told["changes"], strict=True):
                each["flag"] = change.flag
        return plain


def as_text(findings: Sequence[Finding], *, everything: bool = False, markdown: bool = False) -> str:
    """Findings in the order given: the first ones in full, of the others the titles.

    Args:
        findings: Of `engine.diagnose`.
        everything: All in full, with all their causes.
        markdown: A list for a report; else for a terminal.
    """
    whole = findings if everything else findings[:IN_FULL]
    num_causes = None if everything else CAUSES
    tell = _markdown if markdown else _plain
    parts = [tell(finding, finding.causes[:num_causes]) for finding in whole]
    if rest := findings[len(whole) :]:
        mark = "- " if markdown else "   "
        parts.append("\n".join(["And:", *(f"{mark}{each.level}: {each.title}" for each in rest)]))
    return "\n\n".join(parts)


def _plain(finding: Finding, causes: Sequence[Cause]) -> str:
    lines = [f"{finding.level.upper():<8} {finding.title} ({finding.where})", *_wrapped(finding.evidence, " " * 9)]
    for number, cause in enumerate(causes, start=1):
        lines += _wrapped(cause.sentence, " " * 9, f"      {number}. ")
        lines += [f"            {change.flag:<44}  {change.remark}".rstrip() for change in cause.changes]
    return "\n".join(lines)


def _wrapped(text: str, indent: str, first: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first or indent, subsequent_indent=indent, break_long_words=False)


def _markdown(finding: Finding, causes: Sequence[Cause]) -> str:
    lines = [f"- **{finding.level}: {finding.title}** ({finding.where})  ", f"  {finding.evidence}"]
    for number, cause in enumerate(causes, start=1):
        flags = [f"`{each.flag}`" + f" ({each.remark})" * bool(each.remark) for each in cause.changes]
        lines.append(f"    {number}. {cause.sentence}" + f" {', '.join(flags)}" * bool(flags))
    return "\n".join(lines)


def _value(value: Any) -> str:
    """As YAML has it on one line."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) else json.dumps(value)
