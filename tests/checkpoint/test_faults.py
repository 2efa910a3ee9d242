"""A real training that is killed inside a save resumes exactly; damaged checkpoints are refused.

test_kill_points.py kills a fake training at every point of a save.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.kill_points import EXIT_CODE, crash
from tests.support.library import formats as loading
from tests.support.library import manifest, read_full
from tests.support.saves import STEPS, Trainings, assert_same, equal
from tests.support.tiers import tiers

pytestmark = pytest.mark.slow

POINTS = {  # one of each strategy: what is killed, and when
    "ddp": ("write checkpoint.pt", 0),
    "fsdp2": ("write .distcp", 1),
    "zero1": ("written", 1),
    "zero2": ("write optim_states.pt", 0),
    "zero3": ("write optim_states.pt", 1),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("faults"), corpus, cache)


@pytest.mark.parametrize(
    "strategy", tiers(POINTS, daily=["fsdp2", "zero3"])
)  # ddp: test_kill_points.py
def test_a_run_that_is_killed_inside_a_save_resumes_exactly(
    train: Trainings, strategy: str
) -> None:
    point, rank = POINTS[strategy]
    record = train.run(
        strategy, f"killed-{strategy}", prelude=partial(crash, point, rank, at_save=2)
    )
    assert record.answers[rank] == f"killed: exit code {EXIT_CODE}", record.error
    folder, expected = record.run / "checkpoints", train.uninterrupted(strategy)
    newest = manifest.newest(folder)
    assert newest is not None and newest.name == manifest.name(1)
    assert_same(newest, expected / newest.name)
    train.run(strategy, f"killed-{strategy}").check()
    assert_same(folder / manifest.name(STEPS), expected / manifest.name(STEPS))
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == [manifest.name(STEPS - 1), manifest.name(STEPS)], (
        "nothing of the killed save is left"
    )


def unverified() -> None:
    """In each worker: the newest checkpoint is loaded unverified."""
    code: Any = loading
    code.agreed = lambda path: manifest.found(path)[0]


@pytest.mark.parametrize("guarded", tiers([True, False], daily=[True]))
def test_all_ranks_skip_a_damaged_checkpoint_together(train: Trainings, guarded: bool) -> None:
    """One bit of a weight is changed; without the guard training resumes from it."""
    expected = train.uninterrupted("ddp")
    folder = train.folder / f"damaged-{guarded}"
    for step in (STEPS - 2, STEPS - 1):
        shutil.copytree(expected / manifest.name(step), folder / manifest.name(step))
    newest = folder / manifest.name(STEPS - 1)
    weight = torch.load(newest / "checkpoint.pt")["state_dict"]["model.model.norm.weight"]
    content = (newest / "checkpoint.pt").read_bytes()
    place = content.find(weight.numpy().tobytes()) + 2
    (newest / "checkpoint.pt").write_bytes(
        content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    )
    flags = [f"--last_checkpoint.dirpath={folder}"]
    record = train.run(
        "ddp", f"passes-{guarded}", *flags, prelude=None if guarded else unverified
    ).check()
    if guarded:
        assert f"{newest.name} (its checkpoint.pt is not what was written" in record.log(0)
        assert_same(folder / manifest.name(STEPS), expected / manifest.name(STEPS))
    else:
        ends = [read_full(path / manifest.name(STEPS))["state_dict"] for path in (folder, expected)]
        assert not equal(*ends)
