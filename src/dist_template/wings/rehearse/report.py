"""Reports the results of a rehearsal: a line per check, and rehearsal.json."""

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

    def __init__(self, why: str, got: str = "not possible here") -> None:
        super().__init__(got, cause="", where=why, verdict="limit")


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
        return ": ".join(filter(None, (self.where, self.cause)))


@dataclass
class Report:
    """Prints results as they come."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.results: list[Result] = []
        self._started = time.perf_counter()
        print(f"{title}\n", flush=True)

    def add(self, result: Result) -> None:
        cells = (
            result.verdict,
            result.check,
            f"{result.time_s:.1f} s",
            f"{result.got} ({result.expected})",
        )
        print("  ".join(map(str.ljust, cells, WIDTHS)).rstrip(), flush=True)
        sentence = result.sentence
        for earlier in self.results:
            if result.cause and earlier.cause == result.cause:
                sentence = f"{result.where}: see {earlier.check!r}"
        if sentence:
            print(
                textwrap.fill(sentence, 118, initial_indent="    -> ", subsequent_indent="       "),
                flush=True,
            )
        self.results.append(result)

    @property
    def ok(self) -> bool:
        return all(result.verdict != "FAIL" for result in self.results)

    def end(self, folder: Path) -> None:
        """Prints the summary, and writes rehearsal.json into `folder`."""
        count = Counter(result.verdict for result in self.results)
        summary = (
            "all checks hold"
            if self.ok
            else f"{count['FAIL']} of {len(self.results)} checks FAILED"
        )
        summary += f", {count['limit']} not possible here" if count["limit"] else ""
        seconds = time.perf_counter() - self._started
        print(f"\n{summary}; {seconds:.0f} s; logs and configurations are in {folder}")
        found = {
            "title": self.title,
            "ok": self.ok,
            "checks": [asdict(result) for result in self.results],
        }
        folder.mkdir(parents=True, exist_ok=True)  # checks without a training have not made it
        (folder / "rehearsal.json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")
