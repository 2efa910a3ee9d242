"""Several runs side by side: what differs, the results, and the results at equal tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dist_template.table import Table
from dist_template.wings.diagnose import History, read_run
from dist_template.wings.diagnose.report import curves
from tests.support.runs import run
from tests.support.wings import tables
from tests.support.written import falling, write_run

NAMES = ["r0", "r1", "r2"]


def config(name: str, rate: float, seed: int) -> dict[str, Any]:
    return {
        "seed_everything": seed,
        "run": {"name": name},
        "model": {"optim": {"learning_rate": rate}},
    }


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two that differ in their seed, and one with another rate, and with twice the tokens a step for half the steps."""
    made = []
    for number, (rate, seed) in enumerate([(1e-3, 0), (1e-3, 1), (3e-3, 0)]):
        steps, batch = (20, 4096.0) if number < 2 else (10, 8192.0 * 1.25)
        metrics = falling(steps) | {"train/tokens": [batch * (i + 1) for i in range(steps)]}
        metrics["train/loss"] = [10.0 - 0.1 * i + number for i in range(steps)]
        made.append(write_run(tmp_path / "x" / f"r{number}", metrics, config("x", rate, seed)))
    return made


@pytest.fixture
def histories(runs: list[Path]) -> list[History]:
    return [read_run(folder) for folder in runs]


def table(title: str, histories: list[History], names: list[str]) -> Table:
    (found,) = [each for each in tables(histories, names) if title in each.title]
    return found


def row(table: Table, name: str) -> list[str]:
    (found,) = [cells[1:] for cells in table.rows if cells[0] == name]
    return found


def test_each_run_is_a_column(histories: list[History]) -> None:
    final = table("Results", histories, NAMES)
    assert final.head == ["", *NAMES]
    last = [10 - 0.1 * 19, 11 - 0.1 * 19, 12 - 0.1 * 9]
    assert row(final, "train/loss") == [f"{value:.5g}" for value in last]
    assert row(final, "optimizer steps") == ["20", "20", "10"]


def test_runs_are_compared_at_equal_tokens(histories: list[History]) -> None:
    """The first two end at 81,920 tokens, the third at 102,400: its newest value by then is from step 8 of 10."""
    equal = table("At 81,920 tokens", histories, NAMES)
    expected = [10 - 0.1 * 19, 11 - 0.1 * 19, 12 - 0.1 * 7]
    assert row(equal, "train/loss") == [f"{value:.5g}" for value in expected]


def test_a_final_loss_of_nan_is_shown_as_nan(tmp_path: Path) -> None:
    metrics = falling(4)
    metrics["train/loss"][3] = math.nan
    history = read_run(write_run(tmp_path / "x" / "1", metrics))
    assert row(table("Results", [history], ["x/1"]), "train/loss") == ["nan"]


def test_compare_prints_what_differs_and_draws_the_curves_over_each_other(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert run("compare", *map(str, runs)) == 0
    shown = capfd.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert ["seed_everything", "0", "1", "0"] in lines
    assert ["model.optim.learning_rate", "0.001", "0.001", "0.003"] in lines
    assert "run.name" not in shown, "only keys that differ"
    assert (tmp_path / "x/report.html").exists()

    traces: Any = curves.figures([read_run(folder) for folder in runs], NAMES)[
        "Loss, nats per token"
    ]
    assert [trace["line"]["color"] for trace in traces] == [*curves.COLOURS[:3]]


def test_compare_refuses_one_run_or_one_given_twice(
    runs: list[Path], capfd: pytest.CaptureFixture
) -> None:
    assert run("compare", str(runs[0])) == 2
    assert run("compare", str(runs[0]), f"{runs[0].parent}/../x/r0") == 2
    error = capfd.readouterr().err
    assert "got one run" in error and "given twice" in error
