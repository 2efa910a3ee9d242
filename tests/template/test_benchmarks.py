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

TEXTS = [path.read_text("utf-8") for path in (ROOT / "benchmarks").glob("*.py")]
PARTS = sorted(name for text in TEXTS for name in re.findall(r'^NAME = "(.+)"', text, re.MULTILINE))


def benchmarks(*arguments: str) -> str:
    """What `python -m benchmarks` prints."""
    done = subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def test_help_names_every_part() -> None:
    parts = benchmarks("--help").partition("parts:")[2].partition("positional")[0]
    assert sorted(re.findall(r"^  ([\w-]+)  ", parts, re.MULTILINE)) == PARTS


def test_no_page_calls_a_figure_held_that_is_older_than_what_it_measures(tmp_path: Path) -> None:
    """The page is written from the JSON, and by this state of the library: else `python -m benchmarks.pages`."""
    if subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", "HEAD~20"], capture_output=True).returncode:
        pytest.skip("without the history nothing is known of the commits that were measured")
    code = "from benchmarks import pages; print(pages.readme(), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    page = (ROOT / "benchmarks" / "results" / "README.md").read_text("utf-8")
    assert states(done.stdout) == states(page) and states(page), done.stderr[-2000:]


def states(page: str) -> list[tuple[str, bool]]:
    """Each part, and whether it says that it was not measured since."""
    return [(part.split()[0], "**Not measured since**" in part) for part in page.split("\n## ")[1:]]


def test_a_result_is_old_when_what_it_measures_has_changed() -> None:
    """Or when its commit is not in this history; then nothing in its table is held."""
    code = (
        "from benchmarks import pages, record\n"
        "old = record.is_old('HEAD', ('py.typed',)), record.is_old('0123abcd', ('py.typed',))\n"
        "print(*old, pages.MEASURED.keys() == pages.PARTS.keys())\n"
        "record.is_old = lambda commit, measured: measured == ('changed',)\n"
        "step = pages.RESULTS / 'step.json'\n"
        "texts = [record.table(step, (name,)) for name in ('same', 'changed')]\n"
        "print([('| held |' in text, '| not measured since |' in text) for text in texts])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False True True\n[(True, False), (False, True)]\n", done.stdout + done.stderr[-2000:]


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


@pytest.mark.parametrize(("new", "is_more", "is_worse"), [(1.2, True, True), (1.2, False, False), (1.06, True, False)])
def test_a_figure_is_worse_beyond_what_differs_by_chance(new: float, is_more: bool, is_worse: bool) -> None:
    from benchmarks.against import verdict

    runs = {"new": [new, 2 * new, new], "old": [1.0, 2.0, 1.08], "old again": [1.0, 2.1, 1.0]}
    assert bool(verdict("a step", runs, is_more)) is is_worse
    assert verdict("not in the old tree", {"new": [1.0]}, is_more) == []
