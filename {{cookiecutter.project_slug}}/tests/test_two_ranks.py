"""Two processes train as one does: same loss, same gradients, every sample once."""

from __future__ import annotations

from pathlib import Path

from dist_template.testing import rehearse, this_project

PROJECT = this_project(__file__)
CONFIGS = Path(__file__).parents[1] / "configs"


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    flags = [f"--config={CONFIGS}/quickstart.yaml", f"--config={CONFIGS}/strategy/ddp.yaml"]
    assert rehearse(PROJECT, *flags, folder=tmp_path, only="one process") == {}
