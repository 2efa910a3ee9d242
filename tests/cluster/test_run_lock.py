"""One launch at a time writes into a run's folder; a holder that is dead is taken over."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dist_template.cluster.launch import Variable
from dist_template.cluster.run_lock import FILE, RunLock
from tests.support.library import run_lock
from tests.support.runs import main

ELSEWHERE = {"host": "node7", "machine": "node7 another boot", "pid": 4, "since": 1.0, "launch": ""}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BEAT_S": 0.05, "LEASE_S": 0.6, "SETTLE_S": 0.05}.items():
        monkeypatch.setattr(run_lock, name, value)
    for name in (Variable.LAUNCH, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def lock() -> Iterator[RunLock]:
    lock = RunLock()
    yield lock
    lock.release()


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        yield other


def held_by(folder: Path, **holder: Any) -> Path:
    (folder / FILE).write_text(json.dumps(holder), encoding="utf-8")
    return folder / FILE


def neighbour(process: subprocess.Popen) -> dict[str, Any]:
    since = psutil.Process(process.pid).create_time()
    return dict(run_lock.this_process()) | {"pid": process.pid, "since": since}


def test_a_second_process_is_refused_while_the_first_lives(
    lock: RunLock, process: subprocess.Popen, tmp_path: Path
) -> None:
    path = held_by(tmp_path, **neighbour(process))
    before = path.read_bytes()
    why = lock.take(tmp_path)
    assert why and why.startswith(f"{tmp_path} is in use by process {process.pid} on ")
    assert Variable.RUN_ID in why and path.read_bytes() == before
    process.kill()
    time.sleep(0.1)  # its parent has not waited for it: a zombie
    assert lock.take(tmp_path) is None
    assert json.loads(path.read_text())["pid"] == os.getpid()


def test_another_machines_holder_keeps_its_lease(lock: RunLock, tmp_path: Path) -> None:
    path = held_by(tmp_path, **ELSEWHERE)
    ended = threading.Event()
    renewing = threading.Thread(target=run_lock.renew, args=(path, dict(ELSEWHERE), ended))
    renewing.start()
    why = lock.take(tmp_path)
    ended.set()
    renewing.join()
    assert why and "process 4 on node7" in why
    started = time.monotonic()
    assert lock.take(tmp_path) is None
    assert time.monotonic() - started >= run_lock.LEASE_S


def test_a_launchs_restart_does_not_wait(lock: RunLock, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_lock, "LEASE_S", 600.0)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    for launch in ("slurm 17.0", "node0:29400 run"):
        held_by(tmp_path, **ELSEWHERE | {"launch": launch})
        assert lock.take(tmp_path) is None
        monkeypatch.setenv(Variable.LAUNCH, "node0:29400 run")


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    held_by(tmp_path, **dict(run_lock.this_process()) | {"pid": os.getppid(), "since": 1.0})
    code = "import sys, pathlib; from dist_template.cluster.run_lock import RUN_LOCK;"
    code += f"print(RUN_LOCK.take(pathlib.Path({str(tmp_path)!r}))); sys.stdout.flush(); input()"
    options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", code]
    starts: list[Any] = [subprocess.Popen(command, **options) for _ in range(4)]
    answers = [start.stdout.readline().strip() for start in starts]
    for start in starts:
        start.communicate("\n")
    assert answers.count("None") == 1, answers


def test_a_run_that_is_in_use_is_refused_before_anything_is_written(
    flags: list[str], process: subprocess.Popen, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    monkeypatch.setenv(Variable.RUN_ID, "one")
    folder = tmp_path / "runs" / "default" / "one"
    folder.mkdir(parents=True)
    held_by(folder, **neighbour(process))
    assert main(["fit", *flags]) == 2
    assert "is in use by process" in capfd.readouterr().err
    assert [path.name for path in folder.iterdir()] == [FILE]
    monkeypatch.setenv(Variable.RUN_ID, "one")
    process.kill()
    assert main(["fit", *flags, "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]) == 0
    assert (folder / "metrics.jsonl").exists() and not (folder / FILE).exists()
