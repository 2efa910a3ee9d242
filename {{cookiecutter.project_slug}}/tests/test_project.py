"""Tests of module.py, data.py and configs/: every check of the library, and tests of your own.

`make test` runs what takes seconds; `make test ARGS='-m ""'` also rehearses sharded strategies,
with a kill and a resume. One check alone: pytest -k one_batch_can_be_overfitted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from dist_template.testing import batches, build, project_checks, this_project

PROJECT = this_project(__file__)
CONFIGS = Path(__file__).parents[1] / "configs"


# To leave out a check: project_checks(PROJECT, skip={"labels_are_the_next_tokens": "the reason"})
@project_checks(PROJECT)
def test_project(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)


def test_a_loss_is_the_same_for_the_same_batch(tmp_path: Path) -> None:
    """An example of your own: the module and its batches, without a Trainer."""
    flags = ["--data.seq_len=64", f"--data.cache_dir={tmp_path.parent}/cache"]  # the checks made it
    module, data = build(PROJECT, f"--config={CONFIGS}/quickstart.yaml", *flags)
    batch = batches(data, 1)[0]
    losses = [module.eval().training_step(batch, 0) for _ in range(2)]
    assert torch.equal(*losses)
