"""Several runs side by side: what differs, what came out, with spread, and at equal tokens."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from dist_template.observe.history.run import History, read_run
from dist_template.observe.report import curves
from dist_template.observe.report.differences import groups
from dist_template.observe.report.results import side_by_side
from tests.support.runs import run
from tests.support.written import falling, write_run


def config(name: str, rate: float, seed: int) -> dict[str, Any]:
    return {"seed_everything": seed, "run": {"name": name}, "model": {"optim": {"learning_rate": rate}}}


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


def row(table: Any, name: str) -> list[str]:
    (found,) = [cells[1:] for cells in table.rows if cells[0] == name]
    return found


def test_runs_that_differ_in_seeds_alone_are_one_column_with_its_spread(histories: list[History]) -> None:
    assert groups(histories) == [[0, 1], [2]]
    final, _ = side_by_side(histories, ["r0", "r1", "r2"])
    assert final.head == ["", "r0, r1", "r2"] and row(final, "runs") == ["2", "1"]
    last = [10 - 0.1 * 19, 11 - 0.1 * 19]
    assert row(final, "train/loss") == [f"{mean(last):.4f} ± {stdev(last):.4f}", f"{12 - 0.1 * 9:.4f}"]
    assert row(final, "optimizer steps") == ["20 ± 0", "10"]


def test_runs_are_compared_at_the_tokens_that_all_have_seen(histories: list[History]) -> None:
    """The first two end at 81,920 tokens, the third at 102,400: its newest value by then is that of step 8, of 10."""
    _, equal = side_by_side(histories, ["r0", "r1", "r2"])
    assert "81.9 k" in equal.title
    assert row(equal, "train/loss")[1] == f"{12 - 0.1 * 7:.4f}"
    assert row(equal, "train/loss")[0].startswith(f"{mean([10 - 0.1 * 19, 11 - 0.1 * 19]):.4f}")


def test_a_run_that_ended_in_nan_is_not_told_by_an_earlier_value(tmp_path: Path) -> None:
    metrics = falling(4)
    metrics["train/loss"][3] = math.nan
    history = read_run(write_run(tmp_path / "x" / "1", metrics))
    (final,) = side_by_side([history], ["x/1"])
    assert row(final, "train/loss") == ["nan"]


def test_compare_prints_what_differs_and_draws_the_curves_over_each_other(
    runs: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert run("compare", *map(str, runs)) == 0
    shown = capfd.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert ["seed_everything", "0", "1", "0"] in lines and [
        "model.optim.learning_rate",
        "0.001",
        "0.001",
        "0.003",
    ] in lines
    assert "run.name" not in shown, "only keys that differ"
    assert (tmp_path / "x/report.html").exists() and (tmp_path / "x/report.md").exists()

    shown_figures, _ = curves.figures([read_run(folder) for folder in runs], ["r0", "r1", "r2"])
    colours = [trace["meta"]["colour"] for trace in shown_figures[0].plot["data"]]
    assert shown_figures[0].panel.title == "Loss" and colours == [0, 1, 2]


def test_compare_wants_two_runs_and_each_once(runs: list[Path], capfd: pytest.CaptureFixture) -> None:
    assert run("compare", str(runs[0])) == 2
    assert run("compare", str(runs[0]), f"{runs[0].parent}/../x/r0") == 2
    told = capfd.readouterr().err
    assert "got one run" in told and "given twice" in told
