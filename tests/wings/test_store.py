"""`run.store`: checkpoints and files of a run in a store, from which it continues."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from dist_template.wings.diagnose import History
from dist_template.wings.store.callback import Store
from dist_template.wings.store.local import copy_run
from dist_template.wings.store.remote import Remote
from dist_template.wings.store.rule import store_refuses
from tests.support.library import commit, manifest, read_full
from tests.support.runs import StopAfter, logged, newest, only_run, refused, run

ADDRESS = "faulty://bucket/default"
SECRET = "a-secret-of-the-store"


class Faulty(MemoryFileSystem):
    """A store in this process's memory, which records its calls; a test sets its faults."""

    protocol = "faulty"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    calls: list[str] = []
    fault: Callable[[str], object] = staticmethod(lambda name: None)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self.calls.append(f"put {Path(path).name}")
        if (wrong := Faulty.fault(path)) is not None:
            value = wrong
        super().pipe_file(path, value, **options)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self.pipe_file(self._strip_protocol(rpath), Path(lpath).read_bytes())

    def rm(self, path: str, **options: Any) -> None:
        self.calls.append(f"rm {Path(path).name}")
        super().rm(path, **options)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Faulty]]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    for name, empty in (("store", {}), ("pseudo_dirs", [""]), ("calls", [])):
        monkeypatch.setattr(Faulty, name, empty)
    monkeypatch.setattr(Faulty, "fault", staticmethod(lambda name: None))
    yield Faulty


class Run:
    """A run of one process that saves what a test gives it, without a training."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.folder = root / "one"
        self.callback = Store(ADDRESS, folder=str(self.folder), **options)
        self.callback.timeout_s = 0.0
        self.trainer: Any = SimpleNamespace(default_root_dir="", fast_dev_run=False)
        vars(self.trainer).update(is_global_zero=True, global_rank=0, callbacks=[self.callback])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.callback.setup(self.trainer, SimpleNamespace(), "fit")  # ty: ignore[invalid-argument-type]

    def save(self, step: int, settles: bool = True) -> None:
        (self.folder / "metrics.jsonl").write_text(json.dumps({"step": step}))
        path = self.folder / "checkpoints" / manifest.name(step)
        entries = {"step": step, manifest.STORE: self.callback.checkpoint_store}

        def write(folder: Path) -> None:
            (folder / "weights").write_bytes(b"%d" % step * 1000)
            (folder / "meta.pt").write_bytes(b"%d" % step)

        commit.write_into(path, entries, write, trainer=self.trainer)
        if settles:
            self.callback.on_train_end(self.trainer, self.trainer)


def stored() -> list[str]:
    return sorted(name.partition("default/one/")[2] for name in Faulty.store)


def test_the_manifest_is_written_last_and_deleted_first(faulty: Any, tmp_path: Path) -> None:
    one = Run(tmp_path, keep=1)
    one.save(1)
    files = [
        f"checkpoints/step00000001.ckpt/{name}" for name in ("manifest.json", "meta.pt", "weights")
    ]
    assert stored() == [*files, "metrics.jsonl"]
    assert [name for name in faulty.calls if name.startswith("put")][-1] == "put manifest.json"
    faulty.calls.clear()
    one.save(2)
    assert faulty.calls[-2:] == ["rm manifest.json", "rm step00000001.ckpt"]


def damage(name: str, change: Callable[[bytes], bytes | None]) -> None:
    (path,) = [path for path in Faulty.store if path.endswith(f"{manifest.name(2)}/{name}")]
    content = change(Faulty.store.pop(path).getvalue())
    if content is not None:
        fsspec.filesystem("faulty").pipe_file(path, content)


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("name", ["manifest.json", "weights", "meta.pt"])
@pytest.mark.parametrize("change", [lambda data: None, flipped, lambda data: data[:-1]])
def test_the_checkpoint_before_a_damaged_one_is_taken(
    name: str, change: Any, faulty: Any, tmp_path: Path, capsys: Any
) -> None:
    one = Run(tmp_path)
    one.save(1)
    one.save(2)
    damage(name, change)
    shutil.rmtree(one.folder)
    folder = one.folder / "checkpoints"
    copy_run(Remote(f"{ADDRESS}/one"), one.folder, True, folder, folder)
    assert manifest.agreed(folder) == folder / manifest.name(1)
    assert manifest.damage(folder / manifest.name(1)) is None
    assert json.loads((one.folder / "metrics.jsonl").read_text()) == {"step": 2}


def test_only_missing_and_damaged_files_are_fetched(faulty: Any, tmp_path: Path) -> None:
    one = Run(tmp_path)
    one.save(1)
    path = one.folder / "checkpoints" / manifest.name(1)
    weights, meta = path / "weights", path / "meta.pt"
    weights.write_bytes(flipped(weights.read_bytes()))
    (path / "left").touch()
    before = meta.stat().st_ino
    assert manifest.agreed(path.parent) == path and manifest.damage(path) is None
    assert meta.stat().st_ino == before
    meta.unlink()
    assert manifest.torn(path) is None and manifest.agreed(path) == path and meta.exists()


@pytest.mark.parametrize("wrong", [b"", b"half"])
def test_a_store_that_lies_and_one_that_refuses_are_found(
    wrong: bytes, faulty: Any, tmp_path: Path, capsys: Any
) -> None:
    one = Run(tmp_path)
    faulty.fault = staticmethod(lambda path: wrong if path.endswith("weights") else None)
    one.save(1)
    assert one.callback.failed == 1 and not any("manifest" in name for name in stored())
    assert "step00000001.ckpt is not in the store: rank 0: of bucket/" in capsys.readouterr().out
    faulty.fault = staticmethod(lambda path: None)
    one.save(2)
    assert one.callback.failed == one.callback.behind == 0


def test_no_secret_is_printed(
    faulty: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    def refuse(path: str) -> None:
        raise PermissionError(
            f"403 for https://user:pw123@host/x?X-Amz-Signature={SECRET} {SECRET}"
        )

    one = Run(tmp_path)
    faulty.fault = staticmethod(refuse)
    one.save(1)
    printed = capsys.readouterr().out
    assert "403" in printed and SECRET not in printed and "pw123" not in printed
    (finding,) = store_refuses(history(tmp_path, failed=one.callback.failed))
    assert finding.rule == "store_refuses" and finding.level == "error"


def history(folder: Path, **values: float) -> History:
    found = History(folder)
    found.metrics.add(
        {"step": 1, "time": 1.0} | {f"health/store_{k}": v for k, v in values.items()}
    )
    return found


def test_the_next_checkpoint_waits_for_a_slow_store(
    faulty: Any, tmp_path: Path, capsys: Any
) -> None:
    one = Run(tmp_path)
    faulty.fault = staticmethod(lambda path: time.sleep(0.2) if path.endswith("weights") else None)
    begun = time.monotonic()
    one.save(1, settles=False)
    assert time.monotonic() - begun < 0.1
    one.save(2, settles=False)
    assert 0.1 < one.callback.waited_s < 0.5 and "waiting for the upload" in capsys.readouterr().out
    one.callback.teardown(one.trainer, one.trainer, "fit")
    assert Remote(f"{ADDRESS}/one/checkpoints").names() == [manifest.name(1), manifest.name(2)]


WRONG = {
    "s3://user:the-password@bucket/x": "has a user, a password or a query",
    "s3://bucket/x?sig=the-password": "has a user, a password or a query",
    "bucket/prefix": "is not the address of a store",
    "nowhere://bucket/x": "cannot be used: ValueError: Protocol not known",
}


@pytest.mark.parametrize("address", WRONG)
def test_a_wrong_address_is_refused(address: str, flags: list[str], capfd: Any) -> None:
    error = refused("fit", [*flags, f"--run.store={address}"], capfd)
    assert WRONG[address] in error and "the-password" not in error


STOPS = [f"--trainer.callbacks+={StopAfter.__module__}.StopAfter", "--trainer.callbacks.step=12"]


@pytest.mark.slow
def test_a_run_that_loses_its_disk_continues_bit_identically(
    s3: Any, flags: list[str], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags += ["--last_checkpoint.every_n_steps=5", "--store.every_s=0"]
    assert run("fit", *flags, "--run.name=whole") == 0
    stored = [*flags, "--run.store=s3://bucket/prefix", "--run.report=true"]
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run("fit", *stored, *STOPS)
    folder = only_run(tmp_path)
    shutil.rmtree(folder.parent)
    assert run("fit", *stored, "--ckpt_path=last") == 0
    assert only_run(tmp_path) == folder
    whole = only_run(tmp_path, "whole")
    assert logged(folder, "train/loss") == logged(whole, "train/loss")
    one, other = (read_full(newest(path))["state_dict"] for path in (folder, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)
    shutil.rmtree(folder.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    address = f"s3://bucket/prefix/default/{folder.name}"
    assert run("diagnose", address) == 0 and run("report", address) == 0
    best = f"{address}/checkpoints/{manifest.name(20, best=True)}"
    assert run("export", best, f"--output={tmp_path / 'out'}") == 0
    assert run("validate", *stored, f"--ckpt_path={best}") == 0
    assert run("validate", *stored) == 0
    for wrong in ("s3://nowhere/x", "s3://bucket/nowhere"):
        assert "is no run" in refused("diagnose", [wrong], capfd)
    assert "cannot be used" in refused("fit", [*flags, "--run.store=s3://nowhere/x"], capfd)
    recorded = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(os.environ["AWS_SECRET_ACCESS_KEY"].encode() in content for content in recorded)
