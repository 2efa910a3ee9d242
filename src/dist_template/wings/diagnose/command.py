"""`diagnose`: reports what is wrong with a run, the evidence, and which flag to change."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import InputError
from ...observe.history.run import CONFIG, History, last_write, read_run
from ...project import Flags, Project
from .engine import RULES, diagnose, registered_rules
from .finding import NUM_IN_FULL, Finding, as_text, counted


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
    lines, texts = [], []
    for folder in given.runs:
        history = read_run(newest(folder))
        findings = diagnose(history)
        plain = [finding.as_dict() for finding in findings]
        step = _steps(history)[1]
        lines.append({"run": str(history.folder), "step": step, "findings": plain})
        texts.append(_as_text(history, findings, given.all))
    print(json.dumps(lines, indent=2) if given.json else "\n\n".join(texts))


def newest(folder: Path) -> Path:
    """Returns `folder` if it is a run folder, otherwise the run below it that was written last.

    Raises:
        InputError: there is no run.
    """
    if (folder / CONFIG).exists():
        return folder
    if last_write(folder) is not None:
        raise InputError(f"{folder} has no {CONFIG}, which most rules need; give another run")
    written: dict[Path, float] = {}  # run: its last write
    for config in [*folder.glob(f"*/{CONFIG}"), *folder.glob(f"*/*/{CONFIG}")]:
        written[config.parent] = last_write(config.parent) or 0.0
    if not written:
        raise InputError(f"{folder} is not a run folder and contains none; give runs/<name>/<id>")
    return max(written, key=written.__getitem__)


def _as_text(history: History, findings: list[Finding], full: bool) -> str:
    first, last = _steps(history)
    end = history.fact("training.max_steps") or history.key("trainer.max_steps") or 0
    title = f"{history.folder}: step {last}"
    if end > 0:
        title += f" of {end}"
    metrics = f"{len(history.metrics.names)} metrics of steps {first} to {last}"
    checked = f"{len(RULES | registered_rules())} rules checked {metrics}"
    if history.missing:
        checked += f"; {' and '.join(history.missing)} missing, so some rules were skipped"
    if not findings:
        return f"{title}\nnothing found: {checked}"
    text = as_text(findings, num=None if full else NUM_IN_FULL)
    return f"{title}: {counted(findings)}\n\n{text}\n\n{checked}"


def _steps(history: History) -> tuple[int, int]:
    """Returns the first and last step with a metric; (0, 0) without metrics."""
    steps: list[int] = []
    for name in history.metrics.names:
        steps += history.metrics[name].steps[[0, -1]].tolist()
    return min(steps, default=0), max(steps, default=0)
