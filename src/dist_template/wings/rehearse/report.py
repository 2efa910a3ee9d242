"""Reports the results of a rehearsal: a line per check, and rehearsal.json.

A check returns what it found, or raises NotEqual or NotOffered; checks.py makes a `Result` of it.
`Report.add` prints each result when it comes, and `Report.end` the summary."""

import json
import textwrap
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

# limit: the strategy or model does not support the check; no failure
Verdict = Literal["pass", "FAIL", "limit"]
WIDTHS = (7, 36, 6, 0)  # verdict, check, seconds, what was found


@dataclass(eq=False)
class NotEqual(Exception):
    """A check failed; fields as in `Result`."""

    got: str
    cause: str
    where: str = ""
    verdict: Verdict = "FAIL"


class NotOffered(NotEqual):
    """The strategy or the model does not support what the check needs."""

    def __init__(self, reason: str, got: str = "not possible here") -> None:
        super().__init__(got, cause="", where=reason, verdict="limit")


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    check: str  # its name
    expected: str  # what must hold
    got: str  # what was found
    verdict: Verdict
    where: str = ""  # the step or rank where it does not hold
    time_s: float = 0.0  # with the trainings that it started
    cause: str = ""  # the first difference, and the code, parameter or buffer to inspect

    @property
    def sentence(self) -> str:
        """Where it does not hold and its cause, or the one of them that is known."""
        if self.where and self.cause:
            return f"{self.where}: {self.cause}"
        return self.where or self.cause


@dataclass
class Report:
    """Prints results as they come."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.results: list[Result] = []
        self._started = time.perf_counter()
        print(f"{title}\n", flush=True)

    def add(self, result: Result) -> None:
        """Prints a result: a line, and its sentence below."""
        result_time = f"{result.time_s:.1f} s"
        cells = (result.verdict, result.check, result_time, f"{result.got} ({result.expected})")
        print("  ".join(map(str.ljust, cells, WIDTHS)).rstrip(), flush=True)
        sentence = result.sentence
        for earlier in self.results:
            if result.cause and earlier.cause == result.cause:
                sentence = f"{result.where}: see {earlier.check!r}"
        if sentence:
            first, others = "    -> ", "       "
            lines = textwrap.fill(sentence, 118, initial_indent=first, subsequent_indent=others)
            print(lines, flush=True)
        self.results.append(result)

    @property
    def ok(self) -> bool:
        return all(result.verdict != "FAIL" for result in self.results)

    def end(self, folder: Path) -> None:
        """Prints the summary, and writes rehearsal.json into `folder`."""
        count = Counter(result.verdict for result in self.results)
        summary = f"{count['FAIL']} of {len(self.results)} checks FAILED"
        if self.ok:
            summary = "all checks hold"
        if count["limit"]:
            summary += f", {count['limit']} not possible here"
        took_s = time.perf_counter() - self._started
        print(f"\n{summary}; {took_s:.0f} s; logs and configurations are in {folder}")
        results = [asdict(result) for result in self.results]
        content = {"title": self.title, "ok": self.ok, "checks": results}
        folder.mkdir(parents=True, exist_ok=True)  # checks without a training have not made it
        (folder / "rehearsal.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
