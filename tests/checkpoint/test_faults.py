"""Killed inside a save at every point, on every rank, under every kind of strategy; damaged afterwards."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_template.checkpoint import commit, manifest
from dist_template.checkpoint import resume as loading
from dist_template.checkpoint.formats import read_full
from dist_template.errors import InputError
from tests.support.injury import corrupt
from tests.support.saves import COMMITTED, EXIT_CODE, STEPS, Trainings, assert_same, crash, equal, points
from tests.support.tiers import tiers

pytestmark = pytest.mark.slow

STRATEGIES = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("faults"), corpus, cache)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than pytest's, where this machine has one that anyone may write to."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev or not os.access(shm, os.W_OK):
        yield tmp_path
        return
    folder = shm / f"checkpoints-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


# ---- killed inside a save ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["fsdp2"]))
def test_a_kill_at_any_point_of_a_save_leaves_the_newest_valid_checkpoint_to_go_on_from(
    train: Trainings, elsewhere: Path, strategy: str
) -> None:
    """Each launch goes on from what the kill before has left, and is killed at the next point; the last one ends."""
    folder, step = elsewhere / strategy, 1
    launch = partial(train.run, strategy, f"killed-{strategy}", f"--last_checkpoint.dirpath={folder}")
    for number, (point, rank) in enumerate(points(strategy)):
        at_save = 2 if number == 0 else 1  # step 1 is saved in peace, then a kill in each launch
        record = launch(prelude=partial(crash, point, rank, at_save))
        assert record.answers[rank] == f"killed: exit code {EXIT_CODE}", (point, rank, record.error)
        step += point in COMMITTED
        newest = commit.newest(folder)
        assert newest is not None and newest.name == manifest.name(step), (point, rank)
        assert commit.verify(newest) is None, (point, rank)
        assert_same(newest, train.whole(strategy) / newest.name)
    assert step < STEPS - 1, "or the last launch had nothing to do"
    launch().check()
    assert_same(folder / manifest.name(STEPS), train.whole(strategy) / manifest.name(STEPS))
    left = sorted(path.name for path in folder.iterdir())
    assert left == [manifest.name(STEPS - 1), manifest.name(STEPS)], "nothing of the killed saves is left"


LAST = "step00000000.ckpt"


def in_place_and_unverified() -> None:
    """As without this package: one name, written over in place. Rank 1 is killed as it comes to its part of step 3."""

    def begin(path: Path, group: Any = None) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        return path

    code: Any = commit
    names: Any = manifest
    names.name = lambda step, best=False: LAST
    code.begin = begin
    code.finish = lambda *args: commit._agree(None, None, None)
    crash("before optim_states.pt", rank=1, at_save=3)


def test_without_the_guard_a_killed_save_is_a_mixture_of_two_steps(train: Trainings) -> None:
    """What the guard is for. DeepSpeed's parts of two steps load, without a word, as weights of neither."""
    record = train.run("zero2", "mixed", prelude=in_place_and_unverified)
    assert record.answers[1] == f"killed: exit code {EXIT_CODE}"
    mixed = read_full(record.run / "checkpoints" / LAST)
    for path in manifest.found(train.whole("zero2")):
        assert not equal(mixed["state_dict"], read_full(path)["state_dict"]), path


# ---- damaged afterwards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["ddp", "fsdp2"]))
def test_forty_damages_to_a_trained_checkpoint_are_refused(train: Trainings, tmp_path: Path, strategy: str) -> None:
    """200 over the five strategies."""
    draw = random.Random(strategy)
    path = train.whole(strategy) / manifest.name(STEPS)
    for number in range(40):
        copy = shutil.copytree(path, tmp_path / str(number) / path.name)
        done = corrupt(copy, draw)
        with pytest.raises(InputError, match="is damaged: its "):
            commit.agreed(copy)
            pytest.fail(done)


def unverified() -> None:
    """In each worker: what is there is loaded."""
    code: Any = loading
    code.agreed = lambda path: manifest.found(path)[0]


@pytest.mark.parametrize("guarded", [True, False])
def test_all_ranks_pass_over_a_damaged_checkpoint_together(train: Trainings, guarded: bool) -> None:
    """A bit of a weight is changed, which rank 1 alone may notice; without the guard training goes on from it."""
    whole = train.whole("ddp")
    folder = train.folder / f"damaged-{guarded}"
    for step in (STEPS - 2, STEPS - 1):
        shutil.copytree(whole / manifest.name(step), folder / manifest.name(step))
    newest = folder / manifest.name(STEPS - 1)
    weight = torch.load(newest / "checkpoint.pt")["state_dict"]["model.model.norm.weight"]
    content = (newest / "checkpoint.pt").read_bytes()
    place = content.find(weight.numpy().tobytes()) + 2
    (newest / "checkpoint.pt").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    flags = [f"--last_checkpoint.dirpath={folder}"]
    record = train.run("ddp", f"passes-{guarded}", *flags, prelude=None if guarded else unverified).check()
    if guarded:
        assert f"{newest.name} (its checkpoint.pt is not what was written" in record.log(0)
        assert_same(folder / manifest.name(STEPS), whole / manifest.name(STEPS))
    else:
        ends = [read_full(path / manifest.name(STEPS))["state_dict"] for path in (folder, whole)]
        assert not equal(*ends)
