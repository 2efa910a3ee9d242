"""Every part of `make bench` runs. With so little work its figures are not inspected."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import tiers

from .conftest import ROOT

TEXTS = [path.read_text("utf-8") for path in (ROOT / "benchmarks").glob("*.py")]
PARTS = sorted(name for text in TEXTS for name in re.findall(r'^NAME = "(.+)"', text, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("part", tiers(PARTS, daily=["dist"]))
def test_a_part_runs_and_its_json_makes_its_table(part: str, tmp_path: Path) -> None:
    if not (ROOT / "build" / "peers" / "accelerate").exists():
        pytest.skip("the peers are not installed; `make build/peers` does so")
    command = [sys.executable, "-m", "benchmarks", part, "--quick", "--rounds", "1"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / f"{part}.json").read_text("utf-8"))
    assert result["quick"] and (result["figures"] or result["comparisons"])
    assert f"## {part}\n" in done.stdout and f"## {part}\n" in (tmp_path / "README.md").read_text()
    for comparison in result["comparisons"]:
        assert comparison["reference"] in comparison["samples"]
        assert all(len(samples) == 1 for samples in comparison["samples"].values())


CASES = [(1.2, True, True), (1.2, False, False), (1.06, True, False)]


@pytest.mark.parametrize(("new", "is_more", "is_worse"), CASES)
def test_a_figure_is_worse_beyond_what_differs_by_chance(
    new: float, is_more: bool, is_worse: bool
) -> None:
    from benchmarks.against import verdict

    runs = {"new": [new, 2 * new, new], "old": [1.0, 2.0, 1.08], "old again": [1.0, 2.1, 1.0]}
    assert bool(verdict("a step", runs, is_more)) is is_worse
    assert verdict("not in the old tree", {"new": [1.0]}, is_more) == []
