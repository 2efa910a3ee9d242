"""Ten demonstrations of what fails silently elsewhere: each runs, holds, and is on the page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

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


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_a_demonstration_holds(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"DEMONSTRATION": str(tmp_path)}
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    elsewhere, here = ended.stdout.rpartition("elsewhere:")[2].split("here:", 1)
    assert PRINTED[name][0] in elsewhere and PRINTED[name][1] in here, ended.stdout


def test_the_page_lists_each_demonstration() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"shared"}
    page = (ROOT / "docs" / "demonstrations.md").read_text(encoding="utf-8")
    assert scripts == set(PRINTED) and len(scripts) == 10
    assert {name for name in scripts if f"`python demonstrations/{name}.py`" not in page} == set()
