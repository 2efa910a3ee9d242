"""What a rehearsal found: a table that grows as it goes, JSON for programs, JUnit XML for a CI's page."""

from __future__ import annotations

import json
import textwrap
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args
from xml.etree import ElementTree

from ..table import in_columns

Verdict = Literal["pass", "FAIL", "limit", "not run"]
COLUMNS = {"check": 38, "expected": 30, "got": 34, "verdict": 7, "time": 7}  # widths


@dataclass(frozen=True)
class Result:
    """One line.

    Args:
        check: What was looked at.
        expected: What must hold.
        got: What was found.
        verdict: `limit` is what this strategy or model does not offer; `not run` needs a training that failed. Both are
            reported, and fail nothing.
        where: For what does not hold: at which step or rank.
        time_s: Seconds, the trainings that it had to wait for among them.
        cause: For what does not hold: what differs first, and the code, parameter or buffer to look at.
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
        title: What was rehearsed.
        facts: For the JSON: command, sizes, notes.
    """

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.perf_counter()

    def begin(self) -> None:
        print(f"{self.title}\n")
        print(in_columns(COLUMNS, COLUMNS.values()))
        print(in_columns(("-" * width for width in COLUMNS.values()), COLUMNS.values()), flush=True)

    def add(self, result: Result) -> None:
        self.results.append(result)
        values = (result.check, result.expected, result.got, result.verdict, f"{result.time_s:.1f} s")
        cells = [textwrap.wrap(value, width) or [""] for value, width in zip(values, COLUMNS.values(), strict=True)]
        for line in range(max(map(len, cells))):
            row = [cell[line] if line < len(cell) else "" for cell in cells]
            print(in_columns(row, COLUMNS.values()))
        if sentence := self._told_once(result):
            print(textwrap.fill(sentence, 118, initial_indent="    -> ", subsequent_indent="       "))
        print(end="", flush=True)

    def _told_once(self, result: Result) -> str:
        """Its sentence; the cause in full only where it is printed for the first time."""
        first = next(each for each in self.results if each is result or each.cause == result.cause)
        if not result.cause or first is result:
            return result.sentence
        return replace(result, cause=f"the cause given for {first.check!r}").sentence

    @property
    def ok(self) -> bool:
        return all(result.verdict != "FAIL" for result in self.results)

    def end(self, folder: Path) -> None:
        """Print the sum, and write rehearsal.json and rehearsal.xml into `folder`."""
        count = {verdict: sum(r.verdict == verdict for r in self.results) for verdict in get_args(Verdict)}
        seconds = time.perf_counter() - self._began
        limits = f", {count['limit']} not possible here" if count["limit"] else ""
        limits += f", {count['not run']} not run" if count["not run"] else ""
        verdict = f"{count['FAIL']} of {len(self.results)} checks FAILED" if count["FAIL"] else "all checks hold"
        print(f"\n{verdict}{limits}; {seconds:.0f} s; everything is in {folder}")
        (folder / "rehearsal.json").write_text(json.dumps(self._as_dict(), indent=2) + "\n", encoding="utf-8")
        ElementTree.ElementTree(self._as_junit()).write(
            folder / "rehearsal.xml", encoding="utf-8", xml_declaration=True
        )

    def _as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "ok": self.ok, **self.facts, "checks": [asdict(r) for r in self.results]}

    def _as_junit(self) -> ElementTree.Element:
        failures = sum(result.verdict == "FAIL" for result in self.results)
        skipped = sum(result.verdict in ("limit", "not run") for result in self.results)
        counts = {"tests": str(len(self.results)), "failures": str(failures), "skipped": str(skipped)}
        suite = ElementTree.Element("testsuite", {"name": "rehearse", **counts})
        for result in self.results:
            attributes = {"classname": "rehearse", "name": result.check, "time": f"{result.time_s:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", attributes)
            said = f"expected {result.expected}; got {result.got}"
            if result.verdict != "pass":
                kind = "failure" if result.verdict == "FAIL" else "skipped"
                ElementTree.SubElement(case, kind, {"message": said}).text = result.sentence
        return suite
