"""One progress line: what it shows, that it never wraps, and what a log file gets."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from dist_template.callbacks import Console
from pytest import MonkeyPatch

METRICS = {
    "train/loss": 2.345678, "train/grad_norm": 1.5, "train/learning_rate": 3e-4, "perf/tokens_per_s": 123456.0,
    "perf/mfu": 0.42, "perf/data_wait_share": 0.01, "health/errors": 0.0,
}  # fmt: skip


class Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def shown(monkeypatch: MonkeyPatch, columns: int | None, worst: str = "", **without: Any) -> str:
    """What a log step prints on a terminal that wide; None: no terminal."""
    monkeypatch.setattr("sys.stdout", screen := Screen(columns is not None))
    monkeypatch.setenv("COLUMNS", str(columns or 80))
    console = Console()
    console.worst = worst
    trainer: Any = SimpleNamespace(global_step=40, estimated_stepping_batches=1000)
    console._first_step = 30
    console.on_log_step(
        trainer, None, {k: v for k, v in METRICS.items() if k not in without.get("without", ())}
    )
    return screen.getvalue()


def test_a_log_file_gets_plain_lines_with_everything(monkeypatch: MonkeyPatch) -> None:
    line = shown(monkeypatch, None)
    assert "\r" not in line and "\x1b" not in line and line.endswith("\n") and line.count("\n") == 1
    for part in (
        "step 40/1000",
        "loss 2.346",
        "lr 3.00e-04",
        "123,456 tok/s",
        "mfu 42%",
        "eta ",
        "  ok\n",
    ):
        assert part in line


def test_a_terminal_shows_one_line_that_never_wraps(monkeypatch: MonkeyPatch) -> None:
    for columns in (200, 100, 80, 60, 40, 20, 8):
        line = shown(monkeypatch, columns).removeprefix("\r\x1b[K")
        assert "\n" not in line and len(line) < columns, columns
    assert "loss" in shown(monkeypatch, 40) and "mfu" not in shown(monkeypatch, 40), (
        "the end is cut"
    )
