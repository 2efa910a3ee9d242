"""A damaged checkpoint is detected, and the last valid one is never deleted."""

from __future__ import annotations

import errno
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from torch.distributed.checkpoint.api import CheckpointException

from dist_template import InputError
from dist_template.callbacks import BestCheckpoint
from dist_template.callbacks.checkpoint import outdated
from tests.support.formats import NAMES, REST, Tiny, build_optimizer, step

from tests.support.formats import write_distributed, write_file, write_zero  # isort: skip
from tests.support.injury import corrupt
from tests.support.library import by_name, commit, formats, manifest
from tests.support.runs import main, newest, only_run, run

FORMATS = ["file", "distributed", "zero2", "zero3"]


def committed(folder: Path, step: int = 1, write: Any = None, **about: Any) -> Path:
    """A checkpoint of `step`, as `commit.save` makes it of what `write` puts into the folder."""
    path = folder / manifest.name(step)
    aside = commit.begin(path)
    write(aside) if write else (aside / formats.FILE).write_bytes(bytes(1000))
    commit.finish(path, {"step": step, **about}, None)
    return path


def write(aside: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = build_optimizer(model)
    step(model, optimizer)
    state = by_name(optimizer.state_dict(), sum(NAMES, []))
    if kind == "file":
        write_file(aside / formats.FILE, model, optimizer)
    elif kind == "distributed":
        write_distributed(aside, model.state_dict(), state, REST)
    else:
        write_zero(aside, model, state, int(kind[-1]))


@pytest.fixture(params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return committed(tmp_path, write=lambda aside: write(aside, request.param))


def test_every_changed_bit_and_every_truncation_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    assert manifest.damage(checkpoint) is None and manifest.agreed(checkpoint) == checkpoint
    draw = random.Random(0)
    for number in range(50):
        copy = shutil.copytree(checkpoint, tmp_path / str(number) / checkpoint.name)
        done = corrupt(copy, draw)
        assert manifest.damage(copy), done
        with pytest.raises(InputError, match="is damaged: its "):
            manifest.agreed(copy)


def test_without_the_hashes_a_changed_bit_is_loaded_without_an_error(tmp_path: Path) -> None:
    """Why the manifest exists: torch checks no hash when it reads."""
    path = committed(tmp_path, write=lambda aside: write(aside, "file"))
    before = formats.read_full(path)["state_dict"]["first.weight"].clone()
    file = path / formats.FILE
    content = bytearray(file.read_bytes())
    content[content.find(before.numpy().tobytes()) + 2] ^= 1
    file.write_bytes(content)
    assert not torch.equal(formats.read_full(path)["state_dict"]["first.weight"], before)
    assert manifest.torn(path) is None, "its size is right"
    assert "CRC-32" in str(manifest.damage(path))


def test_the_newest_that_is_not_torn_is_used_and_the_others_are_named(tmp_path: Path) -> None:
    paths = [committed(tmp_path, step) for step in (1, 2, 3)]
    (paths[2] / formats.FILE).write_bytes(bytes(999))
    (tmp_path / "step00000009.ckpt").mkdir()
    shutil.copytree(paths[0], tmp_path / ".step00000010.ckpt.tmp")
    said = r"step00000009.ckpt \(it has no manifest.json\), step00000003.ckpt \(its checkpoint.pt"
    with pytest.warns(UserWarning, match=said + ".*step00000002.ckpt is used"):
        assert manifest.newest(tmp_path) == paths[1]


def test_a_disks_refusal_is_returned_and_other_errors_are_raised() -> None:
    def fails(error: BaseException) -> Callable[[], None]:
        def raises() -> None:
            raise error

        return raises

    full = OSError(errno.ENOSPC, "No space left on device")
    assert commit.disk_error(fails(full)) == "rank 0: [Errno 28] No space left on device"
    torchs = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
    assert commit.disk_error(fails(torchs)) == "rank 0: a file could not be written completely"
    several: Any = {1: (full, None)}
    assert commit.disk_error(fails(CheckpointException("write", several))) == f"rank 1: {full}"
    assert commit.disk_error(lambda: None) is None
    with pytest.raises(RuntimeError, match="closed by peer"):
        commit.disk_error(fails(RuntimeError("Connection closed by peer")))


@pytest.mark.parametrize(
    ("steps", "torn", "keep", "deleted"),
    [
        ([0, 1, 2, 3], [], 2, [0, 1]),
        ([1, 2, 3], [2], 2, [2]),  # a torn one does not count as kept
        ([1, 9, 5], [], 2, [9]),  # after a rollback
        ([1, 2], [1, 2], 1, [1]),  # the one just written stays
    ],
)
def test_which_are_deleted(
    tmp_path: Path, steps: list[int], torn: list[int], keep: int, deleted: list[int]
) -> None:
    paths = {number: committed(tmp_path, number) for number in steps}
    for number in torn:
        (paths[number] / formats.FILE).unlink()
    assert sorted(outdated(paths[steps[-1]], keep=keep)) == [paths[each] for each in deleted]


def test_the_best_are_those_in_the_folder(tmp_path: Path) -> None:
    kept: Any = {"keep": 2, "dirpath": str(tmp_path)}
    lowest, highest = BestCheckpoint(mode="min", **kept), BestCheckpoint(mode="max", **kept)
    assert lowest._is_among_the_best(3.0) and not lowest._is_among_the_best(math.nan)
    for number, score in enumerate([3.0, 2.0]):
        committed(tmp_path, number, score=score).rename(tmp_path / manifest.name(number, best=True))
    assert [manifest.step_of(path) for path in manifest.ranked(lowest.folder, "min")] == [1, 0]
    assert lowest._is_among_the_best(2.9) and not lowest._is_among_the_best(3.0)
    assert highest._is_among_the_best(2.1) and not highest._is_among_the_best(2.0)


@pytest.fixture
def quick(flags: list[str]) -> list[str]:
    quick = ["--trainer.limit_val_batches=0", "--trainer.logger=false"]
    return [*flags, *quick, "--last_checkpoint.every_n_steps=2"]


def flip(path: Path) -> None:
    """One bit in the middle of a DDP or single-device checkpoint."""
    content = bytearray((path / formats.FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (path / formats.FILE).write_bytes(content)


def test_an_interrupted_run_resumes_from_its_newest_valid_checkpoint(
    quick: list[str], tmp_path: Path, monkeypatch: MonkeyPatch, capfd: CaptureFixture
) -> None:
    monkeypatch.setenv("DIST_RUN_ID", "job")
    assert main(["fit", *quick, "--trainer.max_steps=4"]) == 0
    flip(newest(only_run(tmp_path)))
    capfd.readouterr()
    with pytest.warns(UserWarning, match="are skipped: step00000004.ckpt"):
        assert main(["fit", *quick, "--trainer.max_steps=6"]) == 0
    shown = capfd.readouterr().out
    assert "resumes from its newest" in shown
    kept = sorted(path.name for path in (only_run(tmp_path) / "checkpoints").iterdir())
    assert kept == ["step00000004.ckpt", "step00000006.ckpt"]
    assert manifest.damage(only_run(tmp_path) / "checkpoints" / kept[0]) is None
    assert main(["fit", *quick, "--trainer.max_steps=6"]) == 0, "a relaunch of what is done"
    assert sorted(path.name for path in (only_run(tmp_path) / "checkpoints").iterdir()) == kept


def test_a_damaged_checkpoint_that_was_named_is_refused_in_one_sentence(
    quick: list[str], tmp_path: Path, capfd: CaptureFixture
) -> None:
    assert run("fit", *quick, "--trainer.max_steps=4") == 0
    path = newest(only_run(tmp_path))
    flip(path)
    capfd.readouterr()
    assert run("fit", *quick, f"--ckpt_path={path}") == 2
    assert "is damaged: its checkpoint.pt is not what was written" in capfd.readouterr().err
    (path / formats.FILE).write_bytes(b"")
    assert run("fit", *quick, f"--ckpt_path={path}") == 2
    assert "has 0 bytes of" in capfd.readouterr().err
