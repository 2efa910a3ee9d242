"""Two nodes that share no disk: ranks, nodes and disks are lost; the run continues from the store."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import shutil
import subprocess
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_template.errors import Exit
from dist_template.wings.store.callback import Store
from dist_template.wings.store.local import copy_run
from dist_template.wings.store.remote import Remote
from tests.support.injury import kill
from tests.support.library import commit, manifest, read_full, weights
from tests.support.runs import Workers, logged, newest, run
from tests.support.saves import crash
from tests.support.stores import Nodes, can_mount
from tests.support.strategies import flags_of

KILLS = int(os.environ.get("KILLS", "20"))
NEW_NAMESPACE = 0x20000  # CLONE_NEWNS

pytestmark = pytest.mark.skipif(not can_mount(), reason="mount namespaces need root")


def node(rank: int, folder: Path, disk: Path, store: str, durable: int, arm: Any) -> None:
    """A node of one rank with its own disk at `folder`: resumes, and saves three steps."""
    ctypes.CDLL(None).unshare(NEW_NAMESPACE)
    for words in ("--make-rprivate /", f"--bind {disk} {folder}"):
        subprocess.run(["mount", *words.split()], check=True)
    os.environ["RANK"] = str(rank)
    meeting = dist.FileStore(f"{folder}-{durable}-{os.getppid()}-{os.environ['TRIAL']}", 2)
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=2, timeout=limit)
    callback = Store(store, folder=str(folder))
    callback.timeout_s = 0.0
    trainer: Any = SimpleNamespace(default_root_dir="", fast_dev_run=False, callbacks=[callback])
    vars(trainer).update(is_global_zero=rank == 0, global_rank=rank, world_size=2)
    callback.setup(trainer, trainer, "fit")
    checkpoints, step = folder / "checkpoints", 0
    copy_run(Remote(store) / folder.name, folder, rank == 0, checkpoints, checkpoints)
    if all(weights.from_all_ranks(bool(manifest.found(checkpoints)))):
        step = manifest.step_of(path := manifest.agreed(checkpoints))
        assert [(path / f"{r}").read_text() for r in range(2)] == [f"{step} of {r}" for r in (0, 1)]
    assert step >= durable
    arm(step + 2)
    for number in range(step + 1, step + 4):
        path = checkpoints / manifest.name(number)
        entries = {"step": number, manifest.STORE: callback.checkpoint_store}

        def write(folder: Path, number: int = number) -> None:
            (folder / f"{rank}").write_text(f"{number} of {rank}")

        commit.write_into(path, entries, write, trainer=trainer)
        if rank == 0:
            (folder / "metrics.jsonl").write_text(f"{number}")
        if commit.leads(checkpoints):
            commit.remove(checkpoints / manifest.name(number - 2)) if number > 2 else None
    callback.on_train_end(trainer, trainer)


@pytest.mark.slow
def test_a_kill_at_any_point_and_lost_disks_cost_no_stored_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, chance = tmp_path / "one", random.Random(0)
    disks, store, killed = [tmp_path / "disk0", tmp_path / "disk1"], tmp_path / "store", 0
    for path in (folder, *disks, store):
        path.mkdir()
    for trial in range(20):
        monkeypatch.setenv("TRIAL", f"{trial}")
        found = store.glob("one/checkpoints/*/manifest.json")
        durable = max((manifest.step_of(path.parent) for path in found), default=0)
        hurt, at = chance.randrange(2), chance.randint(1, 40)
        arm = partial(crash, hurt, at)
        args = [(rank, folder, disks[rank], f"file://{store}", durable, arm) for rank in (0, 1)]
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=node, args=each) for each in args]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes = [process.exitcode for process in processes]
        killed += codes[hurt] == -9
        assert codes == [0, 0] or codes[hurt] == -9, (trial, codes)
        for lost in chance.choice([(), (hurt,), (0, 1)]):
            shutil.rmtree(disks[lost])
            disks[lost].mkdir()
    assert killed > 10 and durable > 20


@pytest.mark.slow
@pytest.mark.nightly  # minutes, as every launcher takes its time
def test_a_training_loses_ranks_nodes_and_disks(s3: Any, flags: list[str], tmp_path: Path) -> None:
    """`KILLS=50 pytest …` for more. Every second one kills a rank; the others both nodes, of which
    one or both lose their disks."""
    run("prepare", *flags)
    steps = [f"--trainer.max_steps={15 * KILLS}", "--trainer.val_check_interval=100"]
    argv = ["fit", *flags, *flags_of("fsdp2"), *steps, "--last_checkpoint.every_n_steps=5"]
    with Workers(2) as workers:
        workers.run([*argv, "--trainer.devices=2"], tmp_path / "record", run_id="whole").check()
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
        nodes.lose(*chance.choice([(0,), (1,), (0, 1)]))
    with nodes:
        assert [each.end(300) for each in nodes.trainings] == [Exit.DONE, Exit.DONE]
    nodes.lose(0, 1)
    s3.get("bucket/prefix/default/nodes", str(tmp_path / "back"), recursive=True)
    back, whole = tmp_path / "back", tmp_path / "runs" / "default" / "whole"
    assert logged(back, "train/loss") == logged(whole, "train/loss")
    one, other = (read_full(newest(path))["state_dict"] for path in (back, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)
