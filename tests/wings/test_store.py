"""`run.store`: a run continues from a store, also after ranks, nodes and disks are lost."""

import json
import multiprocessing
import os
import random
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from dist_template import processes
from dist_template.checkpoint import commit, manifest
from dist_template.checkpoint.formats import read_full
from dist_template.errors import Exit, InputError
from dist_template.wings.diagnose import History
from dist_template.wings.store.callback import upload_files
from dist_template.wings.store.hooks import copy_run, store_refuses
from dist_template.wings.store.remote import Remote
from tests.support.injury import kill
from tests.support.runs import StopAfter, Workers, logged, newest, only_run, refused, run
from tests.support.saves import crash
from tests.support.stores import Nodes, Saving, can_mount, empty
from tests.support.strategies import flags_of

ADDRESS, SECRET = "memory://bucket/default", "a-secret-of-the-store"
FILES: dict[str, Any] = MemoryFileSystem.store


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Saving:
    """A run with a store in this process's memory."""
    FILES.clear()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return Saving(ADDRESS, tmp_path / "one")


def on_put(monkeypatch: pytest.MonkeyPatch, fault: Callable[[str], object]) -> None:
    """Calls `fault` with an object's path before each upload, which its true result replaces."""
    put: Any = MemoryFileSystem.put_file
    both = lambda files, file, path: fault(path) or put(files, file, path)  # noqa: E731
    monkeypatch.setattr(MemoryFileSystem, "put_file", both)


def test_the_manifest_is_last_and_older_checkpoints_deleted(one: Saving, monkeypatch: Any) -> None:
    calls: list[str] = []
    on_put(monkeypatch, lambda path: calls.append(Path(path).name))
    one.save(1)
    assert calls == ["0", "meta.pt", "metrics.jsonl", "manifest.json"]
    one.save(2)
    one.save(3)  # by default the store keeps two, and the disk as many as it keeps
    found = [name for name in Remote(f"{ADDRESS}/one").sizes() if name.endswith("manifest.json")]
    assert found == [f"checkpoints/{manifest.name(step)}/manifest.json" for step in (2, 3)]


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("name", ["manifest.json", "0", "meta.pt"])
@pytest.mark.parametrize("change", [None, flipped, lambda data: data[:-1]])
def test_the_checkpoint_before_a_damaged_one_is_taken(name: str, change: Any, one: Saving) -> None:
    one.save(1)
    one.save(2)
    (stored,) = [path for path in FILES if path.endswith(f"{manifest.name(2)}/{name}")]
    content = FILES.pop(stored).getvalue()
    if change:
        fsspec.filesystem("memory").pipe_file(stored, change(content))
    folder = one.folder / "checkpoints"
    shutil.rmtree(folder / manifest.name(2))
    path = folder / manifest.name(1)
    (path / "0").write_bytes(flipped((path / "0").read_bytes()))
    (path / "meta.pt").unlink()
    (path / "left").touch()
    (one.folder / "metrics.jsonl").unlink()
    copy_run(Remote(f"{ADDRESS}/one"), one.folder, True, folder, folder)
    assert manifest.agreed(folder) == path and manifest.damage(path) is None
    assert json.loads((one.folder / "metrics.jsonl").read_text()) == {"step": 2}


def loses(path: str) -> bool:
    fsspec.filesystem("memory").pipe_file(path, b"")
    return path.endswith("/0")


def refuses(path: str) -> None:
    raise PermissionError(f"403 for https://user:pw123@host/x?X-Amz-Signature={SECRET} {SECRET}")


@pytest.mark.parametrize("fault, sentence", [(loses, "0 of 1000"), (refuses, "403")])
def test_a_store_that_lies_or_refuses_is_found(
    fault: Any, sentence: str, one: Saving, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        on_put(patch, fault)
        one.save(1)
    printed = capsys.readouterr().out
    assert "step00000001.ckpt is not in the store: rank 0: " in printed and sentence in printed
    assert SECRET not in printed and "pw123" not in printed and "manifest.json" not in str(FILES)
    history = History(one.folder)
    history.metrics.add({"step": 1, "time": 1.0, "health/store_failed": one.callback.failed})
    assert [finding.level for finding in store_refuses(history)] == ["error"]
    one.save(2)
    assert one.callback.failed == one.callback.behind == 0


def test_the_next_checkpoint_waits_for_a_slow_store(one: Saving, monkeypatch: Any) -> None:
    said = threading.Event()
    monkeypatch.setattr(one.callback, "_report", lambda sentence: said.set())
    on_put(monkeypatch, lambda path: not said.wait(60))
    one.save(1, settles=False)
    assert not any(".ckpt" in path for path in FILES) and one.callback.waited_s == 0
    one.save(2, settles=False)
    assert one.callback.waited_s > 0
    one.callback.teardown(one.trainer, one.trainer, "fit")
    assert {manifest.name(1), manifest.name(2)} < {Path(path).parts[-2] for path in FILES}


WRONG = {
    "s3://user:the-password@bucket/x": "is not an address without user, password",
    "s3://bucket/x?sig=the-password": "is not an address without user, password",
    "bucket/prefix": "give s3://bucket/prefix",
    "s3://bucket/../x": "and '..': give s3://bucket/prefix",
    "nowhere://bucket/x": "cannot be used: ValueError: Protocol not known",
}


@pytest.mark.parametrize("address", WRONG)
def test_a_wrong_address_is_refused(address: str, flags: list[str], capfd: Any) -> None:
    with pytest.raises(InputError, match="not the name of a file in a run"):
        Remote("memory://bucket") / "../../etc/passwd"
    error = refused("fit", [*flags, f"--run.store={address}"], capfd)
    assert WRONG[address] in error and "the-password" not in error


@pytest.mark.slow
def test_a_run_that_loses_its_disk_continues_bit_identically_and_other_verbs_read_it(
    s3: Any, flags: list[str], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags += ["--last_checkpoint.every_n_steps=5", "--store.every_s=0"]
    assert run("fit", *flags, "--run.name=whole") == 0
    to_store = [*flags, "--run.store=s3://bucket/prefix", "--run.report=true"]
    stop = [f"--trainer.callbacks+={StopAfter.__module__}.StopAfter"]
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run("fit", *to_store, *stop, "--trainer.callbacks.step=12")
    folder, whole = only_run(tmp_path), only_run(tmp_path, "whole")
    shutil.rmtree(folder.parent)
    assert run("fit", *to_store, "--ckpt_path=last") == 0
    assert only_run(tmp_path) == folder
    assert logged(folder, "train/loss") == logged(whole, "train/loss")
    one, other = (read_full(newest(path))["state_dict"] for path in (folder, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)
    shutil.rmtree(folder.parent)
    address = f"s3://bucket/prefix/default/{folder.name}"
    assert run("diagnose", address) == run("report", address) == 0
    best = f"{address}/checkpoints/{manifest.name(20, best=True)}"
    assert run("export", best, f"--output={tmp_path / 'out'}") == 0
    assert run("validate", *to_store, f"--ckpt_path={best}") == run("validate", *to_store) == 0
    assert "is no run" in refused("diagnose", ["s3://bucket/nowhere"], capfd)
    assert "cannot be used" in refused("fit", [*flags, "--run.store=s3://nowhere/x"], capfd)
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    assert not any(secret in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


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
    if all(processes.from_all_ranks(bool(manifest.found(checkpoints)))):
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


def on_own_disk(folder: Path) -> None:
    disk = folder / os.environ["RANK"]
    disk.mkdir(exist_ok=True)
    os.chdir(disk)


@pytest.mark.slow
@pytest.mark.parametrize("name, part", [("fsdp2", "__{}_0.distcp"), ("zero2", "rank_{}_mp")])
def test_a_node_fetches_the_parts_that_its_ranks_read(
    name: str, part: str, flags: list[str], tmp_path: Path
) -> None:
    run("prepare", *flags)
    argv = ["fit", *flags, *flags_of(name), "--trainer.devices=2", "--run.root=runs"]
    argv += ["--last_checkpoint.every_n_steps=5", f"--run.store=file://{tmp_path}/store"]
    options: Any = {"prelude": partial(on_own_disk, tmp_path), "run_id": "nodes"}
    Workers(2).run([*argv, "--trainer.max_steps=5"], tmp_path / "begun", **options).check()
    for disk in (tmp_path / "0", tmp_path / "1"):
        shutil.rmtree(disk)
    argv += ["--trainer.max_steps=6", "--ckpt_path=last"]
    Workers(2).run(argv, tmp_path / "resumed", **options).check()
    files = [str([*(tmp_path / disk).rglob(f"{manifest.name(5)}/**/*")]) for disk in "01"]
    others = part.format(0) in files[1] and name == "zero2"  # settings and step are in rank 0's
    assert not others and all(part.format(disk) in files[disk] for disk in (0, 1)), files
    assert part.format(1) not in files[0]


def test_a_checkpoint_that_is_removed_meanwhile_stops_no_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a run are listed while training removes an old checkpoint: the newest one was
    not in the store then."""
    old = tmp_path / "run" / "checkpoints" / ".step00000010.ckpt.old"
    old.mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    (tmp_path / "run" / "removed.txt").write_text("")
    scan, copy = os.scandir, shutil.copy

    def scan_without_old(path: Any = ".") -> Any:
        if ".ckpt" in str(path):
            raise FileNotFoundError(path)
        return scan(path)

    def copy_without_one(source: Path, target: str) -> Any:
        if source.name == "removed.txt":
            raise FileNotFoundError(source)
        return copy(source, target)

    monkeypatch.setattr(os, "scandir", scan_without_old)
    monkeypatch.setattr(shutil, "copy", copy_without_one)
    sent: dict[str, tuple[int, int]] = {}
    upload_files(Remote("memory://bucket/one"), tmp_path / "run", sent)
    assert [*sent] == ["metrics.jsonl"]
    assert "/bucket/one/metrics.jsonl" in MemoryFileSystem.store
