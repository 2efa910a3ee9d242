"""`pytest -p tests.support.costs`: prints CPU seconds and Python processes per file and test.

CPU seconds, of pytest's process and of those below it, hardly depend on what else the machine runs.
A process is a start of Python or a fork.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

SHOWN = 40
COUNTER = """
import os

def count():
    with open(os.environ["STARTS_FILE"], "a") as file:
        file.write(".")

count()
os.register_at_fork(after_in_child=count)
"""
_FOLDER = Path(tempfile.mkdtemp(prefix="costs"))
_STARTS = _FOLDER / "starts"
_STARTS.touch()
(_FOLDER / "sitecustomize.py").write_text(COUNTER, "utf-8")  # Python runs it at every start
os.environ["STARTS_FILE"] = str(_STARTS)
os.environ["PYTHONPATH"] = f"{_FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
_before = (0.0, 0)
_cpu, _starts = Counter[str](), Counter[str]()


def _spent() -> tuple[float, int]:
    """CPU seconds and processes so far. Processes of a fork server, which lives on, are its children."""
    cpu = sum(os.times()[:4])
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            cpu += sum(child.cpu_times()[:4])
    return cpu, _STARTS.stat().st_size


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart() -> None:
    global _before
    _before = _spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    global _before
    report, now = (yield), _spent()
    report.cost = [now[0] - _before[0], now[1] - _before[1]]
    _before = now
    return report


def pytest_runtest_logreport(report: Any) -> None:
    _cpu[report.nodeid] += report.cost[0]
    _starts[report.nodeid] += report.cost[1]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    files, starts = Counter[str](), Counter[str]()
    for test, seconds in _cpu.items():
        files[test.partition("::")[0]] += seconds
        starts[test.partition("::")[0]] += _starts[test]
    write = terminalreporter.write_line
    total = f"{_cpu.total():.0f} CPU seconds, {_starts.total()} Python processes"
    write(f"costs: {len(_cpu)} tests, {total}")
    for file, seconds in files.most_common():
        write(f"{seconds:8.1f} s {starts[file]:5} {file}")
    for test, seconds in _cpu.most_common(SHOWN):
        write(f"{seconds:8.1f} s {_starts[test]:5} {test}")
