"""Processes of nodes: whose number a signal gets, hosts that do not answer, and a second launch of a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dist_template import InputError
from dist_template.errors import Exit
from dist_template.wings.launch import command, nodes
from tests.support.launched import LONG, Launched, site
from tests.support.line import main
from tests.support.runs import OURS, PROJECT, run
from tests.support.wings import Job
from tests.support.wings import describe_job as describe
from tests.support.wings import launch_target as target
from tests.support.wings import write_job as write

SSH: Any = target("ssh")
BOOT = Path("/proc/sys/kernel/random/boot_id")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as started:
        yield started
        started.kill()


def since(number: int) -> str:
    """The start of a process in clock ticks, and the boot."""
    after_name = Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2].split()
    return f"{after_name[19]} {BOOT.read_text().strip()}"


def record(**changes: Any) -> dict[str, Any]:
    return {"on": "ssh", "id": "", "hosts": [], "ssh": "ssh"} | changes


def test_a_signal_reaches_the_process_that_was_started_and_no_other(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    file, (start, boot) = tmp_path / "node-0.pid", since(process.pid).split()
    for other in (f"{int(start) + 1} {boot}", f"{start} {boot[:-1]}x", "", "no number"):
        file.write_text(f"{process.pid} {other}\n")
        assert SSH.stop(record(), tmp_path) == "this machine: no process", other
        assert not SSH.is_active(record(), tmp_path)
    time.sleep(0.1)
    assert process.poll() is None, "another process has the number that is in the file"
    file.write_text(f"{process.pid} {start} {boot}\n")
    assert SSH.status(record(), tmp_path) == "this machine: running" and SSH.is_active(record(), tmp_path)
    assert SSH.stop(record(), tmp_path) == "this machine: running"
    assert process.wait(10) == -signal.SIGTERM
    file.unlink()
    assert SSH.status(record(), tmp_path) == "this machine: no process"


@pytest.fixture
def job(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(PROJECT)
    os.environ["DIST_RUN_ID"] = "one"
    return describe(OURS, "fit", flags, on_hosts=True)


def test_a_nodes_script_writes_which_process_it_is(job: Job, tmp_path: Path) -> None:
    job = replace(job, folder=tmp_path)
    folder = write(job, "ssh", nodes.script(job, "sleep 1000"))
    (words,) = SSH.commands(job)
    with subprocess.Popen(words) as started:
        while not (file := folder / "node-0.pid").exists() or not file.read_text():
            assert started.poll() is None
            time.sleep(0.02)
        assert file.read_text().split() == [str(started.pid), *since(started.pid).split()]
        assert SSH.stop(record(), folder) == "this machine: running"
        assert started.wait(10) == -signal.SIGTERM


# ---- hosts that do not answer ---------------------------------------------------------------------------------------


def fake_ssh(folder: Path, text: str) -> str:
    """A command in place of ssh; $1 is the host, $2 the command."""
    path = folder / "fake_ssh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_host_whose_login_hangs_is_named(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(nodes, "ANSWER_S", 3.0)
    run("prepare", *flags)
    ssh = fake_ssh(tmp_path, f'[ "$1" = b ] && {{ sleep 1000 & wait; }}; cd {tmp_path}; exec sh -c "true"')
    where, start = site(tmp_path, hosts=["a", "b"], ssh=ssh), time.monotonic()
    assert run("launch", "--on=ssh", *flags, where) == Exit.BAD_INPUT
    assert "b is not ready: no answer in 3 s; edit cluster.hosts, ssh or port" in capsys.readouterr().err
    assert time.monotonic() - start < 30 and not list(tmp_path.glob("runs/*/*"))
    one = SSH.status(record(hosts=["a", "b"], ssh=ssh), tmp_path)
    assert one == "a: running\nb: no answer in 3 s"


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_launch_ends_when_a_host_does_not_answer_any_more(
    is_elastic: bool, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "ANSWER_S", 0.3)
    monkeypatch.setattr(nodes, "OTHERS_S", 0.3)
    ssh = fake_ssh(tmp_path, "sleep 1000 & wait")
    job_site = replace(job.site, ssh=ssh, min_nodes=1 if is_elastic else None)
    job = replace(job, hosts=["a", "b"], nodes=2, site=job_site)
    started: Any = [subprocess.Popen([*words], start_new_session=True) for words in (["true"], [ssh, "b", ""])]
    start = time.monotonic()
    nodes.wait(job, started, tmp_path)
    assert [one.returncode for one in started] == [0, -signal.SIGKILL] and time.monotonic() - start < 20


def test_ctrl_c_ends_a_launch_whose_host_does_not_answer(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers keeps its connection: it saves."""
    monkeypatch.setattr(nodes, "ANSWER_S", 2.0)
    ssh = fake_ssh(tmp_path, '[ "$1" = b ] && { sleep 1000 & wait; }; exit 0')
    job = replace(job, hosts=["a", "b"], nodes=2, site=replace(job.site, ssh=ssh))
    started: Any = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in job.hosts]
    nodes.send_signal(job, started, tmp_path, signal.SIGINT)
    assert started[1].wait(10) == -signal.SIGKILL and started[0].poll() is None
    started[0].kill()


def test_slurm_is_asked_about_the_earlier_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squeue").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called; echo $FOUND; exit $CODE\n')
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    slurm: Any = target("slurm")
    monkeypatch.setenv("CODE", "0")
    for found, is_active in (("7 RUNNING", True), ("", False)):
        monkeypatch.setenv("FOUND", found)
        assert slurm.is_active(record(id="7"), tmp_path) is is_active
    assert "--jobs=7" in (tmp_path / "called").read_text() and not slurm.is_active(record(), tmp_path)
    (tmp_path / "launch.json").write_text(json.dumps(record(on="slurm", id="7")))
    job: Any = SimpleNamespace(run=tmp_path, files=tmp_path, site=SimpleNamespace(options={}))
    monkeypatch.setenv("FOUND", "7 RUNNING")
    with pytest.raises(InputError, match="is running, as `launch --on slurm` has started it"):
        command.require_end(job)
    monkeypatch.setenv("CODE", "1")
    with pytest.raises(InputError, match="squeue fails"):
        slurm.is_active(record(id="7"), tmp_path)
    command.require_end(job)  # nothing answers about the earlier launch: it does not block this one


# ---- a second launch of a run ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_launch_of_a_running_run_leaves_its_files(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(PROJECT)
    run("prepare", *flags)
    first = Launched(tmp_path, "ssh", *flags, site(tmp_path), *LONG)
    try:
        first.reach(2)
        files = {file.name: file.read_text() for file in (first.run / "launch").iterdir() if file.suffix != ".log"}
        os.environ["DIST_RUN_ID"] = first.run.name
        for on in ("ssh", "torchrun"):
            assert main(["launch", f"--on={on}", *flags, *LONG]) == Exit.BAD_INPUT  # `run` names another run
            error = capsys.readouterr().err
            assert f"{first.run} is running, as `launch --on ssh` has started it" in error and "launch stop" in error
        assert all((first.run / "launch" / name).read_text() == text for name, text in files.items())
        assert run("launch", "status", str(first.run)) == 0 and "this machine: running" in capsys.readouterr().out
        assert run("launch", "stop", str(first.run)) == 0
        assert first.end() == Exit.REQUEUE
    finally:
        first.process.kill()


def test_a_launch_is_kept_under_a_new_number_where_one_was_deleted(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(run=tmp_path, files=tmp_path / "launch", hosts=[], site=SimpleNamespace(ssh="ssh"))
    for text in ("1", "2", "3"):
        write(job, "ssh", {"node.sh": text})
    shutil.rmtree(tmp_path / "launch.1")
    write(job, "ssh", {"node.sh": "4"})
    texts = {folder.name: (folder / "node.sh").read_text() for folder in tmp_path.iterdir()}
    assert texts == {"launch": "4", "launch.2": "2", "launch.3": "3"}
    command.withdraw(job)
    texts = {folder.name: (folder / "node.sh").read_text() for folder in tmp_path.iterdir()}
    assert texts == {"launch": "3", "launch.2": "2"}
