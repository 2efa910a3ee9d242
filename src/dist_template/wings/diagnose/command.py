"""`diagnose`: reports what is wrong with a run, the evidence, and which flag to change."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...observe.history.metrics import FILE
from ...observe.history.run import CONFIG, FACTS, OF_A_RUN, History, is_run, read_run
from ...project import Flags, Project
from .engine import RULES, diagnose, registered_rules
from .finding import LEVELS, Finding, as_text


def main(argv: list[str], project: Project) -> None:
    """Prints the findings of each given run, the most severe first.

    Raises:
        InputError: A run does not exist.
    """
    parser = Flags("diagnose", description=__doc__)
    runs = "runs/<name>/<id>, or a folder: its newest run"
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("runs")], help=runs)
    parser.add_argument("--json", action="store_true", help="a list of {run, step, findings}")
    parser.add_argument("--all", action="store_true", help="print all findings in full")
    given = parser.parse_args(argv[1:])
    histories = [read_run(newest(folder)) for folder in given.runs]
    found = [(history, diagnose(history)) for history in histories]
    if given.json:
        print(json.dumps([_as_dict(history, findings) for history, findings in found], indent=2))
    else:
        print("\n\n".join(_as_text(history, findings, given.all) for history, findings in found))


def newest(folder: Path) -> Path:
    """Returns `folder` if it is a run folder, otherwise the run below it that was written last.

    Raises:
        InputError: there is no run.
    """
    if (folder / CONFIG).exists():
        return folder
    if is_run(folder):
        raise InputError(f"{folder} has no {CONFIG}, which most rules need; give another run")
    runs = [path.parent for pattern in ("*", "*/*") for path in folder.glob(f"{pattern}/{CONFIG}")]
    if not runs:
        raise InputError(f"{folder} is not a run folder and contains none; give runs/<name>/<id>")
    return max(runs, key=_last_write)


def _last_write(run: Path) -> float:
    files = [run / name for name in OF_A_RUN if (run / name).exists()]
    return max(file.stat().st_mtime for file in files)


def _as_dict(history: History, findings: list[Finding]) -> dict[str, Any]:
    listed = [finding.as_dict() for finding in findings]
    return {"run": str(history.folder), "step": _steps(history)[1], "findings": listed}


def _as_text(history: History, findings: list[Finding], full: bool) -> str:
    first, last = _steps(history)
    end = history.fact("training.max_steps") or history.key("trainer.max_steps") or 0
    title = f"{history.folder}: step {last}" + (f" of {end}" if end > 0 else "")
    metrics = f"{len(history.metrics.names)} metrics of steps {first} to {last}"
    checked = f"{len(RULES | registered_rules())} rules checked {metrics}"
    lacks = [name for name in (FILE, FACTS) if not (history.folder / name).exists()]
    checked += f"; {' and '.join(lacks)} missing, so some rules were skipped" if lacks else ""
    if not findings:
        return f"{title}\nnothing found: {checked}"
    counts = Counter(finding.level for finding in findings)
    parts: list[str] = []
    for level in LEVELS:
        if counts[level]:
            parts.append(f"{counts[level]} {level}" + ("s" if counts[level] > 1 else ""))
    return f"{title}: {', '.join(parts)}\n\n{as_text(findings, full=full)}\n\n{checked}"


def _steps(history: History) -> tuple[int, int]:
    """Returns the first and last step with a metric; (0, 0) if there is none."""
    steps: list[int] = []
    for name in history.metrics.names:
        steps += history.metrics[name].steps[[0, -1]].tolist()
    return (min(steps), max(steps)) if steps else (0, 0)
