"""A rank is killed at every point of a save: a valid checkpoint is left, the old or the new one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_saves import LOST, STRATEGIES, FakeDdp, FakeZero, launch, weight_of
from tests.support.kill_points import COMMITTED, EXIT_CODE, crash, points
from tests.support.library import commit, manifest


def check_newest(strategy: type[FakeDdp], folder: Path, step: int) -> None:
    newest = manifest.newest(folder)
    assert newest is not None and newest.name == manifest.name(step)
    assert manifest.damage(newest) is None
    assert torch.equal(strategy.load(newest), weight_of(step))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_kill_at_any_point_leaves_a_valid_checkpoint_that_the_next_launch_resumes(
    strategy: type[FakeDdp], tmp_path: Path
) -> None:
    """Each launch resumes from what the kill before has left, and is killed at the next point."""
    folder, step = tmp_path / "checkpoints", 1
    assert launch(strategy, folder, last=1) == [0, 0]
    for point, rank in points(strategy.name):
        codes = launch(strategy, folder, last=step + 1, arm=partial(crash, point, rank, at_save=1))
        assert codes[rank] == EXIT_CODE and codes[1 - rank] in (LOST, 0), (point, rank, codes)
        step += point in COMMITTED
        check_newest(strategy, folder, step)
    assert launch(strategy, folder, last=step + 2) == [0, 0]
    check_newest(strategy, folder, step + 2)
    assert not list(folder.glob(".*")), "nothing of the killed saves is left"


def in_place_and_unverified() -> None:
    """Every save overwrites one folder. Rank 1 is killed before its part of step 3."""
    code: Any = commit

    def begin(path: Path, group: Any = None) -> Path:
        folder = path.parent / manifest.name(0)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    code.begin = begin
    code.finish = lambda path, *args: commit._agree(path, None, None, None)
    crash("before optim_states.pt", rank=1, at_save=3)


def test_without_the_protocol_a_killed_save_is_a_mixture_of_two_steps(tmp_path: Path) -> None:
    """DeepSpeed's files of two steps load without an error, as weights of neither."""
    folder = tmp_path / "checkpoints"
    codes = launch(FakeZero, folder, last=3, arm=in_place_and_unverified)
    assert codes[1] == EXIT_CODE
    mixed = FakeZero.load(folder / manifest.name(0))
    assert torch.equal(mixed, torch.cat([weight_of(3)[:4], weight_of(2)[4:]]))
