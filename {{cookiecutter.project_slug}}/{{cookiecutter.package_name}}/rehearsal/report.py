"""What a rehearsal found: a table that grows as it goes, JSON for programs, JUnit XML for a CI's page."""

from __future__ import annotations

import json
import textwrap
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

COLUMNS = {"check": 38, "expected": 30, "got": 34, "verdict": 7, "time": 7}  # widths


@dataclass(frozen=True)
class Result:
    """One line.

    Args:
        check: What was looked at.
        expected: What must hold.
        got: What was found.
        verdict: `limit` is what this strategy or model does not offer: it is told, and fails nothing.
        where: For what does not hold: the parameter, step or rank where it begins, and what to look at.
        time_s: Seconds, the trainings that it had to wait for among them.
    """

    check: str
    expected: str
    got: str
    verdict: Literal["pass", "FAIL", "limit"]
    where: str = ""
    time_s: float = 0.0


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
        print("  ".join(name.ljust(width) for name, width in COLUMNS.items()).rstrip())
        print("  ".join("-" * width for width in COLUMNS.values()), flush=True)

    def add(self, result: Result) -> None:
        self.results.append(result)
        values = (result.check, result.expected, result.got, result.verdict, f"{result.time_s:.1f} s")
        cells = [textwrap.wrap(value, width) or [""] for value, width in zip(values, COLUMNS.values(), strict=True)]
        for line in range(max(map(len, cells))):
            row = [cell[line] if line < len(cell) else "" for cell in cells]
            print("  ".join(part.ljust(w) for part, w in zip(row, COLUMNS.values(), strict=True)).rstrip())
        if result.where:
            print(textwrap.fill(result.where, 118, initial_indent="    -> ", subsequent_indent="       "))
        print(end="", flush=True)

    @property
    def ok(self) -> bool:
        return all(result.verdict != "FAIL" for result in self.results)

    def end(self, folder: Path) -> None:
        """Print the sum, and write rehearsal.json and rehearsal.xml into `folder`."""
        count = {verdict: sum(r.verdict == verdict for r in self.results) for verdict in ("pass", "FAIL", "limit")}
        seconds = time.perf_counter() - self._began
        limits = f", {count['limit']} not possible here" if count["limit"] else ""
        verdict = f"{count['FAIL']} of {len(self.results)} checks FAILED" if count["FAIL"] else "all checks hold"
        print(f"\n{verdict}{limits}; {seconds:.0f} s; everything is in {folder}")
        (folder / "rehearsal.json").write_text(json.dumps(self._as_dict(), indent=2) + "\n", encoding="utf-8")
        ElementTree.ElementTree(self._as_junit()).write(
            folder / "rehearsal.xml", encoding="utf-8", xml_declaration=True
        )

    def _as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "ok": self.ok, **self.facts, "checks": [asdict(r) for r in self.results]}

    def _as_junit(self) -> ElementTree.Element:
        failures, skipped = (sum(r.verdict == verdict for r in self.results) for verdict in ("FAIL", "limit"))
        counts = {"tests": str(len(self.results)), "failures": str(failures), "skipped": str(skipped)}
        suite = ElementTree.Element("testsuite", {"name": "rehearse", **counts})
        for result in self.results:
            attributes = {"classname": "rehearse", "name": result.check, "time": f"{result.time_s:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", attributes)
            said = f"expected {result.expected}; got {result.got}"
            if result.verdict != "pass":
                kind = "failure" if result.verdict == "FAIL" else "skipped"
                ElementTree.SubElement(case, kind, {"message": said}).text = result.where
        return suite
