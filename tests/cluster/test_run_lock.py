"""One launch at a time writes into a run's folder; ranks whose environments differ exit at once."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from dist_template import Ended
from dist_template.cluster import rendezvous, run_lock
from dist_template.cluster.fingerprint import SameEnvironment
from dist_template.cluster.launch import Variable
from dist_template.cluster.rendezvous import Rendezvous
from dist_template.cluster.run_lock import FILE, RunLock
from dist_template.errors import Exit
from dist_template.wings import values
from tests.support.runs import Workers, main, run

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


OWN: dict[str, Any] = {
    "python": "3.11.7",
    "git_diff": None,
    "packages": {"numpy": "2.0", "torch": "2.13.0"},
    "variables": {"NCCL_DEBUG": "INFO"},
    "config": {"data.seq_len": "32"},
}


def compare(*of_ranks: dict[str, Any], ignore: list[str] | None = None) -> list[Ended | None]:
    """Returns how each rank's comparison ends; each rank has OWN, with the changes given for it."""
    store = dist.HashStore()

    def ended(rank: int) -> Ended | None:
        together = Rendezvous(store, rank, len(of_ranks), 10.0)
        try:
            SameEnvironment(ignore or []).compare(together, OWN | of_ranks[rank])
        except Ended as end:
            return end

    with ThreadPoolExecutor(len(of_ranks)) as threads:
        return [*threads.map(ended, range(len(of_ranks)))]


OLDER = {"numpy": "1.26", "torch": "2.13.0"}
WARN = {"NCCL_DEBUG": "WARN"}
DIFFERENCES = {  # what differs, its key, its group, its value on rank 2
    "python": ({"python": "3.12.1"}, "python", "python", "3.12.1"),
    "version": ({"packages": OLDER}, "packages.numpy", "packages", "1.26"),
    "package": ({"packages": {"torch": "2.13.0"}}, "packages.numpy", "packages", "-"),
    "variable": ({"variables": WARN}, "variables.NCCL_DEBUG", "variables", "WARN"),
    "changed file": ({"git_diff": "0a1b"}, "git_diff", "git_diff", "0a1b"),
    "key": ({"config": {"data.seq_len": "64"}}, "config.data.seq_len", "config", "64"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_one_table_says_which_ranks_have_what(case: str) -> None:
    change, key, group, has = DIFFERENCES[case]
    ends = compare({}, {}, change, {})
    assert [end.code for end in ends if end] == [Exit.MISMATCH] * 4
    head, columns, *rows = str(ends[0]).splitlines()
    assert columns.split() == ["key", "ranks", "value"] and len(rows) == 2
    assert rows[0].split()[:3] == [key, "0-1,", "3"] and rows[1].split() == [key, "2", has]
    assert "\n" not in str(ends[1]) and "rank 0 prints the table" in str(ends[1])
    for waived in (key, group):
        assert compare({}, {}, change, {}, ignore=[waived]) == [None] * 4
    assert compare({}, {}, change, {}, ignore=["packages.scipy"])[0] is not None


def strategy(rank: int, port: int) -> Any:
    found = SimpleNamespace(global_rank=rank, local_rank=rank, world_size=2, num_processes=2)
    found.cluster_environment = SimpleNamespace(main_address="127.0.0.1", main_port=port)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("here", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_never_comes_is_named(here: int, missing: int, monkeypatch: Any) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(Ended, match=rf"rank {missing} of 2 did not connect within 0.5 s") as ended:
        same: Any = lambda met: SameEnvironment().compare(met, OWN)  # noqa: E731
        rendezvous.connect(strategy(here, values.free_port()), 0.5, same)
    assert ended.value.code == Exit.HUNG


@pytest.mark.slow
def test_ranks_that_differ_end_before_the_first_step(flags: list[str], tmp_path: Path) -> None:
    """Without the comparison they train on."""
    assert run("prepare", *flags) == 0
    two = ["fit", *flags, "--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.max_steps=1"]
    two += ["--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"]
    ended = Workers(2).run(two, tmp_path / "on", prelude=partial(other_on_rank_1, tmp_path))
    assert all(answer.startswith("Ended:") for answer in ended.answers.values()), ended.answers
    rows = [line.split() for line in ended.log(0).splitlines()]
    assert ["variables.NCCL_ALGO", "1", "Ring"] in rows
    assert ["packages.numpy", "1", "0.0.1"] in rows
    unlike = partial(unlike_and_not_compared, tmp_path)
    Workers(2).run(two, tmp_path / "off", prelude=unlike).check()


def other_on_rank_1(folder: Path) -> None:
    """A prelude: another version of a package, another variable."""
    if os.environ["RANK"] == "1":
        os.environ["NCCL_ALGO"] = "Ring"
        (folder / "numpy-0.0.1.dist-info").mkdir(parents=True, exist_ok=True)
        sys.path.insert(0, str(folder))


def unlike_and_not_compared(folder: Path) -> None:
    other_on_rank_1(folder)
    SameEnvironment.compare = lambda *args: None  # ty: ignore[invalid-assignment]
