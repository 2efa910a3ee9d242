"""A damaged checkpoint is detected, the last valid one is never deleted, a save is planned once."""

import errno
import math
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.distributed.fake_pg import FakeStore

from dist_template import InputError
from dist_template.callbacks import BestCheckpoint
from dist_template.callbacks.checkpoint import outdated
from dist_template.checkpoint import commit, formats, manifest
from tests.support.injury import corrupt, flip_a_bit
from tests.support.many_ranks import RankZero, state_of
from tests.support.runs import main, newest, only_run, refused


def committed(folder: Path, step: int = 1, **about: Any) -> Path:
    """A checkpoint of `step`, as `commit.save` makes it of what a strategy writes."""

    def write(folder: Path) -> None:
        (folder / formats.FILE).write_bytes(bytes(range(250)) * 4)
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "rank0.pt").write_bytes(b"0123456789")

    path = folder / manifest.name(step)
    commit.write_into(path, {"step": step, **about}, write)
    return path


def extend(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"0")


def add(file: Path) -> None:
    file.with_name("rank1.pt").touch()


@pytest.mark.parametrize("damage", [corrupt, extend, add, Path.unlink], ids=lambda d: d.__name__)
def test_every_changed_bit_and_every_truncation_is_refused(damage: Any, tmp_path: Path) -> None:
    """And a file that is longer, new or missing; the manifest is one of the files."""
    path, draw = committed(tmp_path), random.Random(0)
    assert manifest.damage(path) is None and manifest.agreed(path) == path
    files = [file.relative_to(path) for file in path.rglob("*.*") if file.is_file()]
    assert len(files) == 3
    for number in range(200 if damage is corrupt else len(files)):
        copy = shutil.copytree(path, tmp_path / str(number) / path.name)
        damage(copy, draw) if damage is corrupt else damage(copy / files[number])
        assert manifest.damage(copy), "the damage was not detected"
        with pytest.raises(InputError, match="is damaged: it"):
            manifest.agreed(copy)


def test_the_newest_that_is_not_torn_is_used_and_the_others_are_named(tmp_path: Path) -> None:
    paths = [committed(tmp_path, step) for step in (1, 2, 3)]
    (paths[2] / formats.FILE).write_bytes(bytes(999))
    (tmp_path / "step00000009.ckpt").mkdir()
    shutil.copytree(paths[0], tmp_path / ".step00000010.ckpt.tmp")
    said = r"step00000009.ckpt \(it has no manifest.json\), step00000003.ckpt \(its checkpoint.pt"
    with pytest.warns(UserWarning, match=said + ".*step00000002.ckpt is used"):
        assert manifest.newest(tmp_path) == paths[1]


def test_a_disks_refusal_is_returned_and_other_errors_are_raised() -> None:
    def found(error: Any) -> str | None:
        return commit.disk_error(Mock(side_effect=error))

    full = OSError(errno.ENOSPC, "No space left on device")
    assert found(full) == "rank 0: [Errno 28] No space left on device"
    torchs = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
    assert found(torchs) == "rank 0: a file could not be written completely"
    several: Any = {1: (full, None)}
    assert found(CheckpointException("write", several)) == f"rank 1: {full}"
    assert found(None) is None
    with pytest.raises(RuntimeError, match="closed by peer"):
        found(RuntimeError("Connection closed by peer"))


OUTDATED: Any = [  # a torn one does not count as kept; after a rollback; the one just written stays
    ([0, 1, 2, 3], [], 2, [0, 1]),
    ([1, 2, 3], [2], 2, [2]),
    ([1, 9, 5], [], 2, [9]),
    ([1, 2], [1, 2], 1, [1]),
]


@pytest.mark.parametrize(("steps", "torn", "keep", "deleted"), OUTDATED)
def test_only_the_newest_valid_checkpoints_are_kept(
    tmp_path: Path, steps: Any, torn: Any, keep: int, deleted: Any
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


@pytest.mark.slow
def test_damage_is_never_resumed(flags: Any, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    flags = [*flags, "--trainer.limit_val_batches=0", "--trainer.logger=false"]
    flags += ["--last_checkpoint.every_n_steps=2", "--trainer.max_steps=6"]

    def launch(*more: str) -> list[str]:
        monkeypatch.setenv("DIST_RUN_ID", "job")
        assert main(["fit", *flags, *more]) == 0
        return sorted(path.name for path in (only_run(tmp_path) / "checkpoints").iterdir())

    assert launch("--trainer.max_steps=4") == [manifest.name(2), manifest.name(4)]
    path = newest(only_run(tmp_path))
    flip_a_bit(path / formats.FILE)
    with pytest.warns(UserWarning, match="are skipped: step00000004.ckpt"):
        kept = launch()
    assert "resumes from its newest" in capfd.readouterr().out
    assert kept == [manifest.name(4), manifest.name(6)]
    assert manifest.damage(path) is None, "it was written anew"
    assert launch() == kept, "a relaunch of what is done"
    flip_a_bit(path / formats.FILE)
    error = refused("fit", [*flags, f"--ckpt_path={path}"], capfd)
    assert "is damaged: its checkpoint.pt is not what was written" in error


REPLICAS, SHARDS = 3, 4


def test_one_replica_plans_each_shard_and_a_next_save_sends_no_plan() -> None:
    from dist_template.parallel.mesh import planning

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=REPLICAS * SHARDS)
    try:
        mesh = dist.init_device_mesh("cpu", (REPLICAS, SHARDS))
        weights = {f"layers.{n}.weight": torch.empty(8, 2, device="meta") for n in range(30)}
        state, strategy = state_of(weights, mesh), torch.nn.Module()
        plans, writers = [], Counter[int]()
        for rank in range(REPLICAS * SHARDS):
            mesh._coordinate_on_dim = [rank // SHARDS, rank % SHARDS]  # ty: ignore
            planner = planning.planner(strategy)  # ty: ignore[invalid-argument-type]
            planner.set_up_planner(state)
            plans.append(planner.create_local_plan())
            own = [item.type.name for item in plans[-1].items]
            writers[rank // SHARDS] += own.count("SHARD")
            assert rank == 0 or len(own) == own.count("SHARD")  # settings: in one file
        items = [item.index for plan in plans for item in plan.items]
        found = Counter((index.fqn, index.offset) for index in items)
        shards = 3 * len(weights) * SHARDS
        assert set(found.values()) == {1} and len(found) == shards + len(state) - 3 * len(weights)
        assert min(writers.values()) > sum(writers.values()) / REPLICAS * 0.8
        final, _ = planner.create_global_plan(plans)
        planner.finish_plan(final[-1])
        planner = planning.planner(strategy)  # ty: ignore[invalid-argument-type]
        planner.set_up_planner(state)
        assert not planner.create_local_plan().usable
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("late", [False, True])
def test_rank_0_gets_one_hash_of_each_rank(late: bool, tmp_path: Path) -> None:
    """`late`: a file system lists a file to the rank that wrote it, and not yet to rank 0."""
    received = []
    for num in (64, 128):
        path = tmp_path / manifest.name(num)
        folder = commit.begin(path)
        files = [f"__{rank}_0.distcp" for rank in range(num)]
        for file in files[: num - late]:
            (folder / file).write_bytes(b"0")

        def of(value: Any, rank: int, files: list[str] = files) -> Any:
            if isinstance(value[1], dict):
                return None, {files[rank]: [1, 0]}
            return None, {files[rank]} if late and rank == len(files) - 1 else value[1]

        with RankZero(num, of) as world:
            commit.finish(path, {}, None)
        assert sorted(manifest.read(path)["files"]) == sorted(files)
        received.append(world.bytes)
    assert received[1] < 2.2 * received[0] < 30_000
