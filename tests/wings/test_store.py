"""`run.store`: checkpoints and files of a run in a store, from which it continues."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from dist_template.errors import InputError
from dist_template.wings.diagnose import History
from dist_template.wings.store.hooks import copy_run, store_refuses
from dist_template.wings.store.remote import Remote
from tests.support.library import manifest, read_full
from tests.support.runs import StopAfter, logged, newest, only_run, refused, run
from tests.support.stores import Saving

ADDRESS, SECRET = "faulty://bucket/default", "a-secret-of-the-store"


class Faulty(MemoryFileSystem):
    """A store in this process's memory, which records its calls; a test sets its faults."""

    store: dict[str, Any] = {}
    calls: list[str] = []
    fault: Any = (
        None  # gets a path; raises, waits, or returns what is stored in place of the content
    )

    def pipe_file(self, path: str, value: Any, *args: Any, **options: Any) -> None:
        self.calls.append(f"put {Path(path).name}")
        wrong = Faulty.fault(path) if Faulty.fault else None
        super().pipe_file(path, value if wrong is None else wrong, **options)

    def put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> None:
        self.pipe_file(self._strip_protocol(rpath), Path(lpath).read_bytes())

    def rm(self, path: str, *args: Any, **options: Any) -> None:
        self.calls.append(f"rm {Path(path).name}")
        super().rm(path, *args, **options)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Faulty]]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(Faulty, "protocol", "faulty")
    for name, value in {"store": {}, "pseudo_dirs": [""], "calls": [], "fault": None}.items():
        monkeypatch.setattr(Faulty, name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    yield Faulty


def stored() -> list[str]:
    return sorted(name.partition("default/one/")[2] for name in Faulty.store)


def test_the_manifest_is_written_last_and_deleted_first(faulty: Any, tmp_path: Path) -> None:
    one = Saving(ADDRESS, tmp_path / "one")
    one.save(1)
    names = ("0", "manifest.json", "meta.pt")
    assert stored() == [*(f"checkpoints/step00000001.ckpt/{n}" for n in names), "metrics.jsonl"]
    assert [name for name in faulty.calls if name.startswith("put")][-1] == "put manifest.json"
    shutil.rmtree(one.folder / "checkpoints" / manifest.name(1))
    one.save(2)
    assert faulty.calls[-2:] == ["rm manifest.json", "rm step00000001.ckpt"]
    assert len(stored()) == 4


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("name", ["manifest.json", "0", "meta.pt"])
@pytest.mark.parametrize("change", [lambda data: None, flipped, lambda data: data[:-1]])
def test_the_checkpoint_before_a_damaged_one_is_taken(
    name: str, change: Callable[[bytes], bytes | None], faulty: Any, tmp_path: Path
) -> None:
    one = Saving(ADDRESS, tmp_path / "one")
    one.save(1)
    one.save(2)
    (path,) = [path for path in faulty.store if path.endswith(f"{manifest.name(2)}/{name}")]
    if (content := change(faulty.store.pop(path).getvalue())) is not None:
        fsspec.filesystem("faulty").pipe_file(path, content)
    shutil.rmtree(one.folder)
    folder = one.folder / "checkpoints"
    copy_run(Remote(f"{ADDRESS}/one"), one.folder, True, folder, folder)
    assert manifest.agreed(folder) == folder / manifest.name(1)
    assert manifest.damage(folder / manifest.name(1)) is None
    assert json.loads((one.folder / "metrics.jsonl").read_text()) == {"step": 2}


def test_only_missing_and_damaged_files_are_fetched(faulty: Any, tmp_path: Path) -> None:
    one = Saving(ADDRESS, tmp_path / "one")
    one.save(1)
    path = one.folder / "checkpoints" / manifest.name(1)
    weights, meta = path / "0", path / "meta.pt"
    weights.write_bytes(flipped(weights.read_bytes()))
    (path / "left").touch()
    before = meta.stat().st_ino
    assert manifest.agreed(path.parent) == path and manifest.damage(path) is None
    assert meta.stat().st_ino == before
    meta.unlink()
    assert manifest.torn(path) is None and manifest.agreed(path) == path and meta.exists()


def refuse(path: str) -> None:
    raise PermissionError(f"403 for https://user:pw123@host/x?X-Amz-Signature={SECRET} {SECRET}")


@pytest.mark.parametrize("fault", [lambda path: b"" if path.endswith("/0") else None, refuse])
def test_a_store_that_lies_or_refuses_is_found(
    fault: Any, faulty: Any, tmp_path: Path, capsys: Any
) -> None:
    one = Saving(ADDRESS, tmp_path / "one")
    faulty.fault = staticmethod(fault)
    one.save(1)
    printed = capsys.readouterr().out
    assert "step00000001.ckpt is not in the store: rank 0: " in printed
    assert ("0 of 1000" in printed or "403" in printed) and "manifest.json" not in str(stored())
    assert SECRET not in printed and "pw123" not in printed
    history = History(tmp_path)
    history.metrics.add({"step": 1, "time": 1.0, "health/store_failed": one.callback.failed})
    assert [finding.level for finding in store_refuses(history)] == ["error"]
    faulty.fault = None
    one.save(2)
    assert one.callback.failed == one.callback.behind == 0


def test_the_next_checkpoint_waits_for_a_slow_store(
    faulty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, said = Saving(ADDRESS, tmp_path / "one"), threading.Event()
    monkeypatch.setattr(one.callback, "_report", lambda sentence: said.set())
    faulty.fault = staticmethod(lambda path: None if said.wait(60) else b"")
    one.save(1, settles=False)
    assert stored() == [] and one.callback.waited_s == 0
    one.save(2, settles=False)
    assert one.callback.waited_s > 0
    one.callback.teardown(one.trainer, one.trainer, "fit")
    stores = Remote(f"{ADDRESS}/one/checkpoints").sizes()
    assert {path.split("/")[0] for path in stores} == {manifest.name(1), manifest.name(2)}


WRONG = {
    "s3://user:the-password@bucket/x": "is not an address without user, password and query",
    "s3://bucket/x?sig=the-password": "is not an address without user, password and query",
    "bucket/prefix": "give one such as s3://bucket/prefix",
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
