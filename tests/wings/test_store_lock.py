"""One launch at a time uploads to a run in a store; a store that is down ends no job for good."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dist_template.cluster import run_lock
from dist_template.errors import Exit, InputError
from dist_template.wings.store import hooks, lock, remote
from dist_template.wings.store.lock import StoreLock
from dist_template.wings.store.remote import Remote
from tests.support.runs import OF_ANOTHER_RUN, main, only_run, refused, run
from tests.support.stores import KEYS

ADDRESS = "memory://bucket/default/one"
ELSEWHERE = {"host": "node7", "machine": "node7 another boot", "pid": 4, "since": 1.0}
ELSEWHERE |= {"launch": "", "token": "other", "count": 3, "time": 1.0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"BEAT_S": 0.1, "LEASE_S": 1.0, "SETTLE_S": 0.05}.items():
        monkeypatch.setattr(lock, name, value)
    MemoryFileSystem.store.clear()
    hooks.OWN.clear()
    yield
    for held in lock.LOCKS.values():
        held.release()
    lock.LOCKS.clear()
    MemoryFileSystem.store.clear()


def write(holder: object) -> None:
    fsspec.filesystem("memory").pipe_file(f"{ADDRESS}/.lock", json.dumps(holder).encode())


def test_a_launch_elsewhere_that_counts_keeps_the_run(capsys: Any) -> None:
    ended = threading.Event()

    def count() -> None:
        number = 0
        while not ended.wait(0.05):
            write(ELSEWHERE | {"count": (number := number + 1)})

    write(ELSEWHERE)
    (holder := threading.Thread(target=count)).start()
    why = StoreLock(Remote(ADDRESS)).take()
    ended.set()
    holder.join()
    assert why and why.startswith(f"{ADDRESS} is in use by process 4 on node7: wait until it exits")
    assert "DIST_RUN_ID or run.name" in why and "waiting up to 1 s" in capsys.readouterr().out


def test_a_launch_that_counts_no_more_loses_the_run() -> None:
    write(ELSEWHERE)
    started, mine = time.monotonic(), StoreLock(Remote(ADDRESS))
    assert mine.take() is None and time.monotonic() - started >= lock.LEASE_S
    assert json.loads(Remote(f"{ADDRESS}/.lock").read())["token"] == mine.claim["token"]
    mine.release()
    assert Remote(f"{ADDRESS}/.lock").read() == b""


def test_a_process_of_this_machine_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 600.0)
    parent = psutil.Process(os.getppid())
    neighbour = dict(run_lock.this_process()) | {"pid": parent.pid, "token": "other"}
    write(neighbour | {"since": parent.create_time()})
    why = StoreLock(Remote(ADDRESS)).take()
    assert why and f"is in use by process {parent.pid} on " in why
    write(neighbour | {"since": 1.0})  # another process has its number now
    mine = StoreLock(Remote(ADDRESS))
    assert mine.take() is None
    mine.release()


@pytest.mark.parametrize("holder", [[], {}, 3, {"machine": None, "pid": [1]}, ELSEWHERE])
def test_of_many_launches_at_once_one_gets_the_run(holder: object) -> None:
    write(holder)
    launches = []
    for number in range(4):
        launches.append(StoreLock(Remote(ADDRESS)))
        launches[-1].claim |= {"machine": f"node{number}", "pid": number}
    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(StoreLock.take, launches)]
    assert answers.count(None) == 1, answers
    for launch in launches:
        launch.release()


def test_a_store_without_put_if_absent_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe: Any = MemoryFileSystem.pipe_file
    old = lambda files, path, value: pipe(files, path, value)  # noqa: E731  (takes no `mode`)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", old)
    mine = StoreLock(Remote(ADDRESS))
    assert mine.take() is None and mine.is_held()
    mine.release()


@pytest.mark.slow
def test_a_second_launch_with_another_disk_is_refused_and_changes_nothing(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Two disks: before, both trained, and the store had files of both."""
    parent = psutil.Process(os.getppid())
    holder = dict(run_lock.this_process()) | {"pid": parent.pid, "token": "other"}
    write(holder | {"since": parent.create_time()})
    before = sorted(MemoryFileSystem.store)
    flags += ["--run.store=memory://bucket", "--trainer.max_steps=1", "--store.every_s=0"]

    def fit() -> int:
        for name in OF_ANOTHER_RUN:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("DIST_RUN_ID", "one")
        return main(["fit", *flags])

    assert fit() == Exit.BAD_INPUT
    assert f"{ADDRESS} is in use by process {parent.pid} on " in capfd.readouterr().err
    assert sorted(MemoryFileSystem.store) == before
    write(holder | {"since": 1.0})
    assert fit() == Exit.DONE
    names = {path.removeprefix("/bucket/default/one/") for path in MemoryFileSystem.store}
    assert "metrics.jsonl" in names and ".lock" not in names


@pytest.mark.slow
def test_a_checkpoint_stored_between_the_look_and_the_lock_is_not_lost(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Before, the launch went on from the older checkpoint and wrote over the newer one."""
    flags += ["--run.store=memory://bucket", "--last_checkpoint.every_n_steps=2"]

    def fit(steps: int) -> int:
        for name in OF_ANOTHER_RUN:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("DIST_RUN_ID", "one")
        return main(["fit", *flags, f"--trainer.max_steps={steps}"])

    take, newer = StoreLock.take, dict[str, Any]()

    def take_late(self: StoreLock) -> str | None:
        MemoryFileSystem.store.update(newer)  # the other launch's last upload
        return take(self)

    assert fit(2) == Exit.DONE
    older = dict(MemoryFileSystem.store)
    assert fit(4) == Exit.DONE
    newer |= MemoryFileSystem.store
    MemoryFileSystem.store.clear()
    MemoryFileSystem.store.update(older)
    shutil.rmtree(tmp_path / "runs")  # another disk
    monkeypatch.setattr(StoreLock, "take", take_late)
    capfd.readouterr()
    assert fit(6) == Exit.REQUEUE
    error = capfd.readouterr().err
    assert "has a newer checkpoint than when this launch looked" in error
    assert "Traceback" not in error and "/bucket/default/one/.lock" not in MemoryFileSystem.store
    assert fit(6) == Exit.DONE
    out = capfd.readouterr().out
    assert "step 5/6" in out and "step 4/6" not in out


# ---- a store that is down --------------------------------------------------------------------


class Clock:
    """A time in which only waits take time."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, wait_s: float) -> None:
        self.now += wait_s


@pytest.fixture
def down(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """S3 at a port at which nothing answers."""
    import s3fs

    for name, value in {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    clock = Clock()  # a busy machine needs seconds for a request, and none is left for another
    monkeypatch.setattr(hooks, "DOWN_S", 20.0)
    monkeypatch.setattr(hooks, "time", clock)
    monkeypatch.setattr(remote, "time", clock)
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.slow
def test_a_store_that_is_down_at_a_start_ends_with_75(
    down: None, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    capfd.readouterr()
    assert run("fit", *flags, "--run.store=s3://bucket/prefix") == Exit.REQUEUE
    out, error = capfd.readouterr()
    assert "does not answer (EndpointConnectionError" in out and "trying again for up to" in out
    assert "give the same command again when it answers" in error and "Traceback" not in error
    assert "KEY" not in error and not (tmp_path / "runs").exists()
    assert "cannot be used" in refused("diagnose", ["s3://bucket/prefix/default/one"], capfd)


@pytest.mark.slow
def test_a_store_that_answers_again_in_time_is_waited_for(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    find: Any = MemoryFileSystem.find
    failures = iter([ConnectionError("refused"), TimeoutError("slow")])

    def fails_twice(files: Any, *args: Any, **options: Any) -> Any:
        for error in failures:
            raise error
        return find(files, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "find", fails_twice)
    argv = ["--run.store=memory://bucket", "--trainer.max_steps=1", "--ckpt_path=last"]
    assert run("fit", *flags, *argv) == Exit.DONE
    assert "trying again" in capfd.readouterr().out
    assert f"{only_run(tmp_path).name}/metrics.jsonl" in str(sorted(MemoryFileSystem.store))


def test_only_what_a_person_can_change_ends_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused key is no reason to try again; it is raised at once."""
    monkeypatch.setattr(hooks, "DOWN_S", 600.0)
    bucket = Remote("memory://bucket", until=time.monotonic() + 600, waits_for_answers=True)
    for error in (PermissionError("403"), FileNotFoundError("no bucket"), ValueError("a name")):

        def fails(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(MemoryFileSystem, "touch", fails)
        with pytest.raises(InputError, match="check the address, and what the credentials permit"):
            bucket.check()


# ---- markers of folders, and a proxy's pages -------------------------------------------------


@pytest.mark.slow
def test_markers_of_folders_are_skipped(s3: Any, tmp_path: Path) -> None:
    """As consoles and other tools write them, with and without objects below."""
    import boto3

    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    for key in ("one/", "one/checkpoints/", "one/wandb/", "one/config.yaml", "one/checkpoints/x"):
        client.put_object(Bucket="bucket", Key=key, Body=b"a" * (key[-1] != "/"))
    assert Remote("s3://bucket/one").sizes() == {"checkpoints/x": 1, "config.yaml": 1}


class Proxy(BaseHTTPRequestHandler):
    """Answers every request with its own page."""

    def do_GET(self) -> None:
        page = b"\n<!DOCTYPE HTML>\n<html><body>Please log in</body></html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page if self.command != "HEAD" else b"")

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def without_page(folder: Path) -> bool:
    return not any(b"log in" in path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_proxys_page_is_refused_and_never_stored(
    proxy: str, down: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
    reads: list[Callable[[Remote], object]] = [Remote.read]
    reads.append(lambda remote: remote.get("config.yaml", tmp_path))
    for read in reads:
        with pytest.raises(InputError, match="a page of HTML came in its place, as from a proxy"):
            read(Remote("s3://bucket/one/manifest.json"))
    assert without_page(tmp_path)


def test_a_page_in_place_of_a_manifest_is_refused_until_it_is_gone(tmp_path: Path) -> None:
    memory, name = fsspec.filesystem("memory"), "checkpoints/step00000001.ckpt/manifest.json"
    memory.pipe_file(f"{ADDRESS}/{name}", b"<html>Please log in</html>")
    memory.pipe_file(f"{ADDRESS}/config.yaml", b"run: {}\n")
    with pytest.raises(InputError, match="a page of HTML came in its place"):
        hooks.copy_run(Remote(ADDRESS), tmp_path, True, tmp_path / "a", tmp_path / "a")
    assert without_page(tmp_path)
    memory.pipe_file(f"{ADDRESS}/{name}", b'{"time": 1.0}')
    hooks.copy_run(Remote(ADDRESS), tmp_path, True, tmp_path / "a", tmp_path / "a")
    assert (tmp_path / "a" / "step00000001.ckpt" / "manifest.json").read_text() == '{"time": 1.0}'
