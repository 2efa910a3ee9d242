"""docs/learning_rate.md's program: a power law over the best learning rates of several widths."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dist_template.wings.sweep import study

DOCS = Path(__file__).parents[2] / "docs"
DEFINITION = {
    "space": {"model.optim.learning_rate": {"log": [1e-4, 1e-1]}}, "flags": [], "metric": "eval/loss", "mode": "min",
    "sampler": "tpe", "pruner": "none", "prune_after": 10, "name": "x", "of": "x",
}  # fmt: skip


def test_the_docs_program_finds_a_planted_power_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are a parabola around the optimum 0.3 / width^0.75, and high where a training would diverge."""
    page = (DOCS / "learning_rate.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    folders = [tmp_path / str(width) for width in (64, 128, 256)]
    for folder in folders:
        best, sweep = 0.3 / int(folder.name) ** 0.75, planted(folder)
        for rate in np.geomspace(best / 9, best * 7, 12):
            number = plant_one(sweep, float(rate))
            loss = 2 + 0.1 * np.log(rate / best) ** 2 + 5 * (rate > 4 * best)
            sweep.study().tell(number, float(loss))
            sweep.run(number).mkdir(exist_ok=True)
            (sweep.run(number) / "facts.json").write_text(
                json.dumps({"model": {"width": int(folder.name)}})
            )
    monkeypatch.setattr(sys, "argv", ["lr_transfer.py", "4096", *map(str, folders)])
    exec(compile(program, "lr_transfer.py", "exec"), {})
    printed = capsys.readouterr().out
    assert (
        "width^-0.75, at most x1.00 off" in printed
        and f"width 4096: {0.3 / 4096**0.75:.2e}" in printed
    )
    monkeypatch.setattr(
        sys, "argv", ["lr_transfer.py", "4096", *map(str, folders[:2]), str(at_the_edge(tmp_path))]
    )
    with pytest.raises(SystemExit, match="not between the learning rates tried: widen the space"):
        exec(compile(program, "lr_transfer.py", "exec"), {})


def planted(folder: Path) -> study.Sweep:
    folder.mkdir()
    return study.Sweep(folder, DEFINITION)


def plant_one(sweep: study.Sweep, rate: float) -> int:
    sweep.study().enqueue_trial({"model.optim.learning_rate": rate})
    known = {key: study.distribution(entry) for key, entry in sweep.definition["space"].items()}
    return sweep.study().ask(known).number


def at_the_edge(tmp_path: Path) -> Path:
    """The lowest learning rate is the best one."""
    sweep = planted(tmp_path / "edge")
    for rate in (0.001, 0.002, 0.004, 0.008, 0.016):
        sweep.study().tell(plant_one(sweep, rate), rate)
    return sweep.folder
