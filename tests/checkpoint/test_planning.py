"""At any number of ranks a save is planned once, and rank 0 gets what rank 0 alone needs."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.library import commit, manifest
from tests.support.many_ranks import RankZero, state_of

REPLICAS, SHARDS = 3, 4


def test_one_replica_plans_each_shard_and_a_next_save_sends_no_plan() -> None:
    from dist_template.checkpoint import planning

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
