"""Progress of verbs: in place on a terminal, a line now and then in a log file."""

import re
import sys
from typing import Any

import pytest

from dist_template import progress
from dist_template.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_log_file_gets_a_line_now_and_then(clock: Clock, capsys: Any) -> None:
    for _ in Progress("evaluate", "batches", 100).over(range(100)):
        clock.now += 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "evaluate: 10/100 batches  1 per s  eta 0:01:30",
        "evaluate: 20/100 batches  1 per s  eta 0:01:20",
    ]
    assert len(lines) == 10


def test_a_short_loop_prints_nothing_and_an_open_one_no_end(clock: Clock, capsys: Any) -> None:
    for _ in Progress("export", "tensors", 5).over(range(5)):
        clock.now += 1
    assert capsys.readouterr().out == ""
    for _ in Progress("evaluate", "batches", None).over(range(10)):
        clock.now += 2
    assert capsys.readouterr().out.splitlines()[0] == "evaluate: 5 batches  0.5 per s"


def test_a_terminal_has_one_line_that_is_removed(
    clock: Clock, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for _ in Progress("export", "tensors", 4).over(range(4)):
        clock.now += 0.5
    shown = capsys.readouterr().out
    assert "\n" not in shown and shown.endswith("\r\x1b[K")
    assert re.findall(r"(\d)/4", shown) == ["1", "2", "3", "4"]
