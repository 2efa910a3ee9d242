"""Two nodes without a shared disk: ranks, nodes and disks are lost; the run continues."""

import multiprocessing
import os
import random
from datetime import timedelta
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_template.errors import Exit
from dist_template.wings.store.hooks import copy_run
from dist_template.wings.store.remote import Remote
from tests.support.injury import kill
from tests.support.library import commit, manifest, read_full, weights
from tests.support.runs import Workers, logged, newest, run
from tests.support.saves import crash
from tests.support.stores import Nodes, Saving, can_mount, empty
from tests.support.strategies import flags_of

KILLS = int(os.environ.get("KILLS", "20"))
LIMIT = timedelta(seconds=20)


def train(rank: int, disk: Path, store: str, durable: int, hurt: int, at: int) -> None:
    """A node of one rank with its own `disk`, where both have the same path: resumes, and saves
    three steps; the rank `hurt` is killed before the operation `at` from the second one on."""
    os.chdir(disk)
    os.environ["RANK"] = f"{rank}"
    meeting = dist.FileStore(f"{store.removeprefix('file://')}-{os.environ['TRIAL']}", 2)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=2, timeout=LIMIT)
    folder, step = Path("one"), 0
    saving, checkpoints = Saving(store, folder, rank), folder / "checkpoints"
    copy_run(Remote(store) / "one", folder, rank == 0, checkpoints, checkpoints)
    if all(weights.from_all_ranks(bool(manifest.found(checkpoints)))):
        path = manifest.agreed(checkpoints)
        step = manifest.step_of(path)
        assert {(path / f"{each}").read_text() for each in (0, 1)} == {f"{step}" * 1000}
    assert step >= durable
    crash(hurt, at, step + 2)
    for number in range(step + 1, step + 4):
        saving.save(number, settles=number == step + 3)
        if commit.leads(checkpoints) and number > 2:
            commit.remove(checkpoints / manifest.name(number - 2))


@pytest.mark.slow
def test_kills_and_lost_disks_cost_no_step_in_the_store(tmp_path: Path, monkeypatch: Any) -> None:
    store, disks, chance = tmp_path / "store", [tmp_path / "0", tmp_path / "1"], random.Random(0)
    fork, killed, durable = multiprocessing.get_context("fork"), 0, 0
    for path in (store, *disks):
        path.mkdir()
    for trial in range(20):
        monkeypatch.setenv("TRIAL", f"{trial}")
        found = store.glob("one/checkpoints/*/manifest.json")
        durable = max((manifest.step_of(path.parent) for path in found), default=0)
        hurt, at = chance.randrange(2), chance.randint(1, 40)
        args = [(rank, disks[rank], f"file://{store}", durable, hurt, at) for rank in (0, 1)]
        processes = [fork.Process(target=train, args=each) for each in args]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes = [process.exitcode for process in processes]
        assert codes == [0, 0] or codes[hurt] == -SIGKILL, (trial, codes)
        killed += codes[hurt] == -SIGKILL
        empty(*chance.choice([(), (disks[hurt],), disks]))
    assert killed > 10 and durable > 20


@pytest.mark.slow
@pytest.mark.nightly  # minutes, as every launcher takes its time
@pytest.mark.skipif(not can_mount(), reason="mount namespaces need root")
def test_a_training_loses_ranks_nodes_and_disks(s3: Any, flags: list[str], tmp_path: Path) -> None:
    """`KILLS=50 …` for more. Every second kills a rank; the others both nodes, and empty disks."""
    run("prepare", *flags)
    steps = [f"--trainer.max_steps={15 * KILLS}", "--trainer.val_check_interval=100"]
    argv = ["fit", *flags, *flags_of("fsdp2"), *steps, "--last_checkpoint.every_n_steps=5"]
    two = [*argv, "--trainer.devices=2"]
    Workers(2).run(two, tmp_path / "record", run_id="whole").check()
    argv += ["--trainer.devices=1", "--trainer.num_nodes=2", "--run.store=s3://bucket/prefix"]
    argv += ["--store.every_s=0", "--last_checkpoint.asynchronous=true"]
    chance, nodes = random.Random(KILLS), Nodes(tmp_path / "nodes", tmp_path / "runs", argv)
    first = nodes.trainings[0]

    def lives() -> int:
        return len({step.life for step in first.steps()})

    for _ in range(0, KILLS, 2):
        before = lives()
        with nodes:
            for kills_rank in (True, False):
                first.wait(lambda before=before: lives() > before, 120)
                before = lives()
                first.reach(first.steps()[-1].step + chance.randint(6, 11), 120)
                first.wait(lambda: bool(s3.glob("bucket/**/step*/manifest.json")), 120)
                if kills_rank:
                    kill(chance.choice([*chance.choice(nodes.trainings).ranks().values()]))
        empty(*chance.choice([nodes.disks[:1], nodes.disks[1:], nodes.disks]))
    with nodes:
        assert [each.end(300) for each in nodes.trainings] == [Exit.DONE, Exit.DONE]
    back, whole = tmp_path / "back", tmp_path / "runs" / "default" / "whole"
    s3.get("bucket/prefix/default/nodes", str(back), recursive=True)
    assert logged(back, "train/loss") == logged(whole, "train/loss")
    one, other = (read_full(newest(path))["state_dict"] for path in (back, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)
