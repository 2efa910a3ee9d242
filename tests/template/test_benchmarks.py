"""Every part of `make bench` and every demonstration runs; their figures are not inspected."""

import json
import re
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, output

TEXTS = [path.read_text("utf-8") for path in (ROOT / "benchmarks").glob("*.py")]
PARTS = sorted(name for text in TEXTS for name in re.findall(r'^NAME = "(.+)"', text, re.MULTILINE))


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_and_its_json_makes_its_table(part: str, tmp_path: Path) -> None:
    if not (ROOT / "build" / "peers" / "accelerate").exists():
        pytest.skip("the peers are not installed; `make build/peers` does so")
    command = [sys.executable, "-m", "benchmarks", part, "--quick", "--rounds", "1"]
    command += ["--output", str(tmp_path)]
    printed = output(*command, cwd=ROOT)
    result = json.loads((tmp_path / f"{part}.json").read_text("utf-8"))
    assert result["quick"] and (result["figures"] or result["comparisons"])
    assert f"## {part}\n" in printed and f"## {part}\n" in (tmp_path / "README.md").read_text()
    for comparison in result["comparisons"]:
        assert comparison["reference"] in comparison["samples"]
        assert all(len(samples) == 1 for samples in comparison["samples"].values())


CASES = [(1.2, True, True), (1.2, False, False), (1.06, True, False)]


@pytest.mark.parametrize(("new", "is_more", "is_worse"), CASES)
def test_a_figure_is_worse_beyond_chance(new: float, is_more: bool, is_worse: bool) -> None:
    from benchmarks.against import verdict

    runs = {"new": [new, 2 * new, new], "old": [1.0, 2.0, 1.08], "old again": [1.0, 2.1, 1.0]}
    assert bool(verdict("a step", runs, is_more)) is is_worse
    assert verdict("not in the old tree", {"new": [1.0]}, is_more) == []


# ---- demonstrations of what fails silently elsewhere ---------------------------------------------

FOLDER = ROOT / "demonstrations"
PRINTED = {  # what a demonstration prints in the lines "elsewhere" and "here"
    "assistant_mask": ("0 of 38 tokens count", "these count: 'Four"),
    "clipping": ("the norm is", "pass gradient norm = one process"),
    "expert_adapters": ("adapters of experts", "8 of 8 are not zero"),
    "hang": ("", "rank 1 is stalled"),
    "loss_count": ("% off)", "pass accumulation = one big batch"),
    "packed_documents": ("another document changes logits", "{'sdpa': 0.0, 'eager': 0.0}"),
    "resume": ("resumed with [0, 1, 2", "bit-identical"),
    "torn_checkpoint": ("loads without an error", "damaged checkpoints are skipped"),
    "zero3_adapters": ("adapters: [0, 0, 0, 0]", "norm of B"),
    "zero3_weights": ("without ZeRO-3", "bit-identical"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_a_demonstration_holds(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    printed = output(*command, cwd=ROOT, DEMONSTRATION=str(tmp_path))
    elsewhere, here = printed.rpartition("elsewhere:")[2].split("here:", 1)
    assert PRINTED[name][0] in elsewhere and PRINTED[name][1] in here, printed


def test_the_page_lists_each_demonstration() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"shared", "weights", "finetune"}
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert scripts == set(PRINTED) and len(scripts) == 10
    assert {name for name in scripts if f"`python demonstrations/{name}.py`" not in page} == set()
