"""Tests of module.py, data.py and configs/: every check of the library, and tests of your own.

`make test` runs what takes seconds; `make test ARGS='-m ""'` also rehearses sharded strategies,
with a kill and a resume. One check alone: pytest -k one_batch_can_be_overfitted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dist_template.testing import first_steps, project_checks, quick_flags, this_project

PROJECT = this_project(__file__)


# To leave out a check: project_checks(PROJECT, skip={"labels_are_the_next_tokens": "the reason"})
@project_checks(PROJECT)
def test_project(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)


def test_the_same_seed_trains_the_same_way(tmp_path: Path) -> None:
    """An example of your own: six steps of the configuration made small, twice."""
    once = first_steps(PROJECT, *quick_flags(PROJECT), folder=tmp_path / "once")
    assert once == first_steps(PROJECT, *quick_flags(PROJECT), folder=tmp_path / "again")
