"""Histories of the trainings of fault_runs.py: rules are tested on them without training.

    python -m tests.support.recorded [NAME …]     # trains them again, in ten minutes

A recording has what rules can read: metrics, sections of the configuration, facts. Times begin with
the job; folders and hosts have made-up names."""

import json
import platform
import re
import sys
import tempfile
from pathlib import Path

from dist_template.observe.history.run import read_lines
from dist_template.wings import diagnose as diagnosis
from dist_template.wings.diagnose import History, read_run
from tests import PROJECT, ROOT
from tests.support.fault_runs import ALL, Trainings
from tests.support.line import PACKAGE

FOLDER = Path(__file__).parent / "recorded"
SECTIONS = ("model", "data", "trainer", "numerics", "last_checkpoint", "preemption")
RULES = Path(diagnosis.__file__).parent
FILES = [*RULES.glob("*.py"), *RULES.glob("rules/*.py")]
METRICS = sorted({m for path in FILES for m in re.findall(r'"(\w+/\w+)"', path.read_text("utf-8"))})


def recorded(name: str) -> History:
    data = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    metrics, lines = data.pop("metrics"), data.pop("lines")
    history = History(Path("runs/default") / name, **data)
    for step, time, *values in lines:
        line = {m: value for m, value in zip(metrics, values, strict=True) if value is not None}
        history.metrics.add({"step": step, "time": time, **line})
    return history


def record(run: Path, root: Path) -> None:
    """Writes the history of `run`, whose texts, caches and runs are under `root`."""
    history = read_run(run)
    start = history.environment["job_started"]
    lines = read_lines(run / "metrics.jsonl")
    metrics = [name for name in METRICS if any(name in line for line in lines)]
    data = {
        "config": {section: history.config[section] for section in SECTIONS},
        "facts": history.facts,
        "environment": {"job_started": 0.0, "cpu_count": history.environment["cpu_count"]},
        "incidents": [{k: v for k, v in i.items() if k != "time"} for i in history.incidents],
        "goodput": history.goodput,
        "crashes": [each | {"time": each["time"] - start} for each in history.crashes],
        "metrics": metrics,
    }
    rows = []
    for line in lines:
        rounded = [float(f"{line[m]:.5g}") if m in line else None for m in metrics]
        rows.append([line["step"], round(line["time"] - start, 3), *rounded])
    parts = [f'"{name}": {json.dumps(value)}' for name, value in data.items()]
    parts.append('"lines": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]")
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    names = {str(root): "/faults", str(PROJECT): ".", str(ROOT): ".", PACKAGE: "package"}
    names[f'"{platform.node()}"'] = '"node1"'
    for found, name in names.items():
        text = text.replace(found, name)
    (FOLDER / f"{run.name}.json").write_text(text, encoding="utf-8")


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        trainings = Trainings(Path(folder))
        for training in (each for each in ALL if not names or each.name in names):
            record(trainings(training), Path(folder))
            print(training.name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
