"""`diagnose`: reports what is wrong with a run, the evidence, and which flag to change."""

import json
import os
from pathlib import Path

from ...errors import InputError
from ...foreign import refuse_links
from ...observe.history.run import RunFile
from ...project import Flags, Project
from ..history import last_write, of_any_types, read_run
from ..store.hooks import local_copy
from .engine import diagnose
from .expected import last_step, progress
from .finding import as_text, counted


def main(argv: list[str], project: Project) -> None:
    """Prints the findings of each given run, the most severe first. Raises InputError if a run does
    not exist."""
    parser = Flags("diagnose", description=__doc__)
    runs = "runs/<name>/<id>, or a folder: its newest run"
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("runs")], help=runs)
    parser.add_argument("--json", action="store_true", help="a list of {run, step, findings}")
    given = parser.parse_args(argv[1:])
    lines, texts = [], []
    for folder in given.runs:
        run = newest(folder)
        with of_any_types([run]):
            history = read_run(run)
            findings, title = diagnose(history), f"{history.folder}: {progress(history)}"
            plain = [finding.as_dict() for finding in findings]
            step = last_step(history)
        lines.append({"run": str(history.folder), "step": step, "findings": plain})
        checked = f"checked {len(history.metrics.names)} metrics"
        if history.missing:
            checked += f"; {' and '.join(history.missing)} missing, so some rules were skipped"
        if findings:
            texts.append(f"{title}: {counted(findings)}\n\n{as_text(findings)}\n\n{checked}")
        else:
            texts.append(f"{title}\nnothing found: {checked}")
    print(json.dumps(lines, indent=2) if given.json else "\n\n".join(texts))


def newest(folder: Path) -> Path:
    """Returns `folder` if it is a run folder, its copy if it is in a store, otherwise the run below
    it that was written last. Raises InputError if there is no run."""
    folder = Path(local_copy(folder))
    if os.path.lexists(folder / RunFile.CONFIG):
        refuse_links(folder)
        return folder
    if last_write(folder) is not None:
        raise InputError(
            f"{folder} has no {RunFile.CONFIG}, which most rules need; give another run"
        )
    written: dict[Path, float] = {}  # run: its last write
    for config in [*folder.glob(f"*/{RunFile.CONFIG}"), *folder.glob(f"*/*/{RunFile.CONFIG}")]:
        written[config.parent] = last_write(config.parent) or 0.0
    if not written:
        raise InputError(f"{folder} is not a run folder and contains none; give runs/<name>/<id>")
    return max(written, key=written.__getitem__)
