"""Reports the results of a rehearsal: a line per check, and rehearsal.json."""

from __future__ import annotations

import json
import textwrap
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ...table import in_columns

Verdict = Literal["pass", "FAIL", "limit", "not run"]
WIDTHS = (7, 36, 6, 0)  # verdict, check, seconds, what was found
NOT_POSSIBLE = "not possible here"


class NotEqual(Exception):
    """A check failed.

    Args:
        got: What was found.
        cause: The first difference and the code to inspect; several checks may have the same.
        where: The step, if it is known.
    """

    verdict: Verdict = "FAIL"

    def __init__(self, got: str, cause: str, where: str = "") -> None:
        super().__init__(got)
        self.got = got
        self.cause = cause
        self.where = where


class NotOffered(NotEqual):
    """The strategy or the model does not support what the check needs."""

    verdict = "limit"

    def __init__(self, why: str, got: str = NOT_POSSIBLE) -> None:
        super().__init__(got, cause="", where=why)


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Args:
        check: The check's name.
        expected: What must hold.
        got: What was found.
        verdict: `limit`: this strategy or model does not support it. `not run`: it needs a training
            that failed. Neither counts as a failure.
        where: The step or rank where it does not hold.
        time_s: Seconds, including the trainings that it started.
        cause: The first difference, and the code, parameter or buffer to inspect.
    """

    check: str
    expected: str
    got: str
    verdict: Verdict
    where: str = ""
    time_s: float = 0.0
    cause: str = ""

    @property
    def sentence(self) -> str:
        return ": ".join(part for part in (self.where, self.cause) if part)


@dataclass
class Report:
    """Prints results as they come.

    Args:
        title: What is rehearsed.
        facts: Further entries of the JSON: sizes, notes.
    """

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._started = time.perf_counter()
        print(f"{self.title}\n", flush=True)

    def add(self, result: Result) -> None:
        seconds, found = f"{result.time_s:.1f} s", f"{result.got} ({result.expected})"
        print(in_columns((result.verdict, result.check, seconds, found), WIDTHS), flush=True)
        known = [other.check for other in self.results if other.cause == result.cause]
        self.results.append(result)
        if result.cause and known:
            result = replace(result, cause=f"the cause given for {known[0]!r}")
        if result.sentence:
            lines = textwrap.wrap(result.sentence, 111)
            print("    -> " + "\n       ".join(lines), flush=True)

    @property
    def ok(self) -> bool:
        return all(result.verdict != "FAIL" for result in self.results)

    def end(self, folder: Path) -> None:
        """Prints the summary, and writes rehearsal.json into `folder`."""
        count = Counter(result.verdict for result in self.results)
        summary = "all checks hold"
        if not self.ok:
            summary = f"{count['FAIL']} of {len(self.results)} checks FAILED"
        summary += f", {count['limit']} not possible here" if count["limit"] else ""
        summary += f", {count['not run']} not run" if count["not run"] else ""
        seconds = time.perf_counter() - self._started
        print(f"\n{summary}; {seconds:.0f} s; logs and configurations are in {folder}")
        checks = [asdict(result) for result in self.results]
        found = {"title": self.title, "ok": self.ok, **self.facts, "checks": checks}
        text = json.dumps(found, indent=2) + "\n"
        folder.mkdir(
            parents=True, exist_ok=True
        )  # the two checks of wings/rehearse/command.py train nothing
        (folder / "rehearsal.json").write_text(text, encoding="utf-8")
