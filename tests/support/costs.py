"""`pytest -p tests.support.costs`: prints CPU seconds and Python processes per file, and the most expensive tests.

CPU seconds, of pytest's process and of the ended processes below it, hardly depend on what else the machine runs.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SHOWN = 40
COUNTER = "import os\nwith open(os.environ['STARTS_FILE'], 'a') as file:\n    file.write('.')\n"
_FOLDER = Path(tempfile.mkdtemp(prefix="costs"))
_STARTS = _FOLDER / "starts"
_STARTS.touch()
(_FOLDER / "sitecustomize.py").write_text(COUNTER, encoding="utf-8")  # Python runs it at every start
os.environ["STARTS_FILE"] = str(_STARTS)
os.environ["PYTHONPATH"] = f"{_FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
_before = (0.0, 0)
_cpu, _starts = Counter[str](), Counter[str]()


def _spent() -> tuple[float, int]:
    return sum(os.times()[:4]), _STARTS.stat().st_size


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
    write(f"costs: {len(_cpu)} tests, {_cpu.total():.0f} CPU seconds, {_starts.total()} Python processes")
    for file, seconds in files.most_common():
        write(f"{seconds:8.1f} s {starts[file]:5} {file}")
    for test, seconds in _cpu.most_common(SHOWN):
        write(f"{seconds:8.1f} s {_starts[test]:5} {test}")
