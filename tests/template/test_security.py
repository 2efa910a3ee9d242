"""SECURITY.md: each input has a row, which names a test that exists."""

import re

import pytest

from tests import ROOT

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+?) \| (trusted|not trusted) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
ROW = "input, trusted, what it can do, tests"
# What verbs read that somebody else may have written, each in the first column of a row.
INPUTS = (
    "configuration", "run's folder", "checkpoint", "store", "model", "data file", "plug-in",
    "client of `serve`", "hostfile", "terminal", "environment", "template", "rank",
)  # fmt: skip


def test_every_input_has_a_row() -> None:
    named = " ".join(row[0] for row in ROWS)
    assert len(ROWS) >= len(INPUTS) and [name for name in INPUTS if name not in named] == []


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40] for row in ROWS])
def test_each_rows_tests_exist(row: tuple[str, ...]) -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row[3])
    assert tests, f"{row[0]} names no test"
    for file, name in tests:
        assert f"def {name or 'test_'}" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
