"""`run.store`: checkpoints and files of a run in a store, from which it continues."""

import json
import os
import shutil
import threading
from collections.abc import Callable
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
    assert not FILES and one.callback.waited_s == 0
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
