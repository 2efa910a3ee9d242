"""Reports the results of a rehearsal: a line per check as soon as it is known, and rehearsal.json at the end."""

from __future__ import annotations

import json
import textwrap
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..table import in_columns

Verdict = Literal["pass", "FAIL", "limit", "not run"]
WIDTHS = (7, 36, 6, 0)  # verdict, check, seconds, what was found


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Args:
        check: The check's name.
        expected: What must hold.
        got: What was found.
        verdict: `limit`: this strategy or model does not support it. `not run`: it needs a training that failed. Both
            are reported and count as no failure.
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

    def begin(self) -> None:
        self._began = time.perf_counter()
        print(f"{self.title}\n", flush=True)

    def add(self, result: Result) -> None:
        self.results.append(result)
        cells = (result.verdict, result.check, f"{result.time_s:.1f} s", f"{result.got} ({result.expected})")
        print(in_columns(cells, WIDTHS), flush=True)
        if sentence := self._sentence(result):
            print(textwrap.fill(sentence, 118, initial_indent="    -> ", subsequent_indent="       "), flush=True)

    def _sentence(self, result: Result) -> str:
        """Returns the result's sentence; a cause that was printed before is replaced by a reference to it."""
        first = next(each for each in self.results if each is result or each.cause == result.cause)
        if not result.cause or first is result:
            return result.sentence
        return replace(result, cause=f"the cause given for {first.check!r}").sentence

    @property
    def ok(self) -> bool:
        return all(result.verdict != "FAIL" for result in self.results)

    def end(self, folder: Path) -> None:
        """Prints the summary, and writes rehearsal.json into `folder`."""
        count = {verdict: sum(r.verdict == verdict for r in self.results) for verdict in get_args(Verdict)}
        summary = f"{count['FAIL']} of {len(self.results)} checks FAILED" if count["FAIL"] else "all checks hold"
        summary += f", {count['limit']} not possible here" if count["limit"] else ""
        summary += f", {count['not run']} not run" if count["not run"] else ""
        print(f"\n{summary}; {time.perf_counter() - self._began:.0f} s; logs and configurations are in {folder}")
        found = {"title": self.title, "ok": self.ok, **self.facts, "checks": [asdict(r) for r in self.results]}
        (folder / "rehearsal.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
