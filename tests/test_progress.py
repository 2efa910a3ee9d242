"""Progress of verbs: in place on a terminal, a line now and then in a log file."""

import re
import sys
import threading
from typing import Any

import pytest

from dist_template import progress
from dist_template.progress import Progress, running


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
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "evaluate: 10/100 batches  1 per s  eta 0:01:30",
        "evaluate: 20/100 batches  1 per s  eta 0:01:20",
    ]
    assert len(lines) == 10


def test_a_short_loop_prints_nothing_and_an_open_one_no_end(clock: Clock, capsys: Any) -> None:
    for _ in Progress("export", "tensors", 5).over(range(5)):
        clock.now += 1
    assert capsys.readouterr().err == ""
    for _ in Progress("evaluate", "batches", None).over(range(10)):
        clock.now += 2
    assert capsys.readouterr().err.splitlines()[0] == "evaluate: 5 batches  0.5 per s"


def test_a_terminal_has_one_line_that_is_removed(
    clock: Clock, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for _ in Progress("export", "tensors", 4).over(range(4)):
        clock.now += 0.5
    shown = capsys.readouterr().err
    assert "\n" not in shown and shown.endswith("\r\x1b[K")
    assert re.findall(r"(\d)/4", shown) == ["1", "2", "3", "4"]


def test_what_nobody_counts_shows_its_time(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = threading.Event()
    show = progress._show
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.01)
    monkeypatch.setattr(progress, "_show", lambda line: (show(line), shown.set()))
    with running("export: to ONNX"):
        assert shown.wait(60)
    out, error = capsys.readouterr()
    assert re.match(r"export: to ONNX, 0 s\n", error) and out == ""


def test_a_body_that_fails_ends_its_progress(capsys: Any) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="full"), running("export: writing"):
        raise ValueError("full")
    assert threading.active_count() == before and capsys.readouterr().err == ""
