"""A run's folder as training would have left it, for tests of what reads it."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

HOSTILE = """<script>document.title = "owned"</script><img src=x onerror="alert(1)">\
'"></pre></script>&amp;"""


def falling(steps: int) -> dict[str, list[float]]:
    """A healthy loss, and what goes with it."""
    return {
        "train/loss": [2 + 5 * math.exp(-8 * i / steps) for i in range(steps)],
        "train/grad_norm": [1.0 + 0.1 * (i % 3) for i in range(steps)],
        "train/learning_rate": [1e-3] * steps,
        "train/tokens": [4096.0 * (i + 1) for i in range(steps)],
        "perf/tokens_per_s": [10_000.0] * steps,
    }


def write_run(
    folder: Path,
    metrics: dict[str, list[float]],
    config: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    **environment: Any,
) -> Path:
    """Metrics' values of steps 1, 2, …; NaN is written as training does."""
    folder.mkdir(parents=True)
    config = config or {"run": {"name": folder.parent.name}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), "utf-8")
    if defaults:
        (folder / "defaults.yaml").write_text(yaml.safe_dump(defaults), "utf-8")
    if facts:
        (folder / "facts.json").write_text(json.dumps(facts), "utf-8")
    command = "python -m trainer fit --trainer.max_steps=10 --ckpt_path last"
    recorded = {"command": command.split(), "host": "node1"}
    (folder / "environment.json").write_text(json.dumps(recorded | environment), "utf-8")
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for i in range(max(map(len, metrics.values()), default=0)):
            line = {name: values[i] for name, values in metrics.items() if i < len(values)}
            file.write(json.dumps({"step": i + 1, "time": 1.8e9 + i, **line}) + "\n")
    seconds = {"productive": 90.0, "start": 10.0}
    goodput = {"attempt": 1.0, "time": 101.0, "from_step": 0, "step": 1, **seconds}
    (folder / "goodput.jsonl").write_text(json.dumps(goodput) + "\n", "utf-8")
    return folder
