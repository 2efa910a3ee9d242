"""Sharded strategies train as one process does, and a killed run resumes exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from dist_template.testing import rehearse, this_project

PROJECT = this_project(__file__)
CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_sharded_strategy_passes_every_check(strategy: str, tmp_path: Path) -> None:
    flags = [f"--config={CONFIGS}/pretrain.yaml", f"--config={CONFIGS}/strategy/{strategy}.yaml"]
    assert rehearse(PROJECT, *flags, folder=tmp_path) == {}
