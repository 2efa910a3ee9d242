"""Hooks of diagnosis and report in a run: see dist_template.hooks."""

import json
from pathlib import Path

from ...errors import InputError
from ...observe.crash import record_of
from ...observe.history.run import RunFile
from ...project import has_command_line
from ..history import History, read_run
from .next_commands import next_commands

OF_MEMORY = ("out_of_memory", "memory_grows", "memory_nearly_full")
NUM_FINDINGS = 3  # that are printed at the end of a run


def on_crash(error: Exception) -> str | None:
    """Returns the findings about memory, if memory ran out; others do not explain a crash."""
    path = record_of(error)
    if path is None:
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["kind"] != "out_of_memory":
        return None
    from .engine import diagnose
    from .finding import as_text

    folder = path.parent.parent
    try:
        history = read_run(folder)
    except InputError:  # it crashed before anything else was written
        history = History(folder, crashes=[record])
    return as_text([each for each in diagnose(history) if each.rule in OF_MEMORY]) or None


def at_run_end(run: Path, error: BaseException | None) -> None:
    """Writes the report, and prints the first findings of a run that has finished."""
    from .report.page import HTML, write

    if not (run / RunFile.CONFIG).exists():
        return
    history = read_run(run)
    if history.key("run.report", True):
        _, (findings,) = write([run], run)
        print(f"report            {run / HTML}", flush=True)
        for finding in findings[:NUM_FINDINGS] if error is None else ():
            print(f"finding           {finding.line}")
    if error is None and has_command_line():
        for what, command in next_commands(history).items():
            print(f"{what:<18}{command}")
