"""Two processes, and small micro-batches, train as one process with one large batch does."""

from __future__ import annotations

from pathlib import Path

import pytest
from dist_template.testing import rehearse, this_project

PROJECT = this_project(__file__)
CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("checks", ["one process", "one big batch"])
def test_training_does_not_depend_on_how_a_batch_is_distributed(
    checks: str,
    tmp_path: Path,
) -> None:
    flags = [f"--config={CONFIGS}/quickstart.yaml", f"--config={CONFIGS}/strategy/ddp.yaml"]
    assert rehearse(PROJECT, *flags, folder=tmp_path, only=checks) == {}
