"""Every part of `make bench` runs. With so little work its figures say nothing, and are not looked at."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import tiers

from .conftest import ROOT

PARTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\nNAME = " in path.read_text("utf-8"))


def benchmarks(*arguments: str) -> str:
    """What `python -m benchmarks` prints."""
    done = subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def test_help_names_every_part() -> None:
    parts = benchmarks("--help").partition("parts:")[2].partition("positional")[0]
    assert sorted(re.findall(r"^  (\w+)  ", parts, re.MULTILINE)) == PARTS


@pytest.mark.slow
@pytest.mark.parametrize("part", tiers(PARTS, daily=["data"]))
def test_a_part_runs_and_its_json_makes_its_table(part: str, tmp_path: Path) -> None:
    if not (ROOT / "build" / "peers" / "accelerate").exists():
        pytest.skip("the peers are not installed; `make build/peers` does so")
    subprocess.run(["make", "-s", "dev"], cwd=ROOT, check=True)
    printed = benchmarks(part, "--quick", "--rounds", "1", "--output", str(tmp_path))
    result = json.loads((tmp_path / f"{part}.json").read_text("utf-8"))
    assert result["quick"] and result["versions"]["torch"]
    assert result["figures"] or result["comparisons"]
    assert f"## {part}\n" in printed
    for comparison in result["comparisons"]:
        assert comparison["reference"] in comparison["samples"]
        assert all(len(samples) == 1 for samples in comparison["samples"].values())
