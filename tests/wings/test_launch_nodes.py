"""Processes of nodes: whose number a signal gets, hosts that do not answer, and a second launch of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_template.errors import Exit
from dist_template.wings.launch import nodes
from tests.support.launched import LONG, Launched, site
from tests.support.line import main
from tests.support.runs import OURS, PROJECT, run
from tests.support.wings import Job
from tests.support.wings import describe_job as describe
from tests.support.wings import launch_target as target
from tests.support.wings import write_job as write

SSH: Any = target("ssh")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        ["sleep", "1000"], env={**os.environ, "DIST_RUN_ID": "one.[a]"}
    ) as started:
        yield started
        started.kill()


def record(**changes: Any) -> dict[str, Any]:
    return {"on": "ssh", "id": "", "hosts": [], "ssh": "ssh"} | changes


def test_a_signal_reaches_the_process_that_was_started_and_no_other(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    others = [tmp_path / name / "launch" for name in ("two", "one", "one.[a]b", "oneX[a]")]
    for folder in [*others, mine := tmp_path / "one.[a]" / "launch"]:
        folder.mkdir(parents=True)
        (folder / "node-0.pid").write_text(f"{process.pid}\n")
    for other in others:
        assert SSH.stop(record(), other) == "this machine: no process", other
    time.sleep(0.1)
    assert process.poll() is None, "another process has the number that is in the file"
    assert SSH.status(record(), mine) == "this machine: running"
    assert SSH.stop(record(), mine) == "this machine: running"
    assert process.wait(10) == -signal.SIGTERM
    assert SSH.status(record(), mine) == "this machine: no process"


@pytest.fixture
def job(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(PROJECT)
    os.environ["DIST_RUN_ID"] = "one"
    return describe(OURS, "fit", flags, on_hosts=True)


def test_a_nodes_script_writes_which_process_it_is(job: Job, tmp_path: Path) -> None:
    job = replace(job, folder=tmp_path)
    write(job, "ssh", nodes.script(job, "sleep 1000"))
    (words,) = SSH.commands(job)
    with subprocess.Popen(words) as started:
        while SSH.status(record(), job.files) != "this machine: running":
            assert started.poll() is None
            time.sleep(0.02)
        assert (job.files / "node-0.pid").read_text() == f"{started.pid}\n"
        assert SSH.stop(record(), job.files) == "this machine: running"
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
    ssh = fake_ssh(
        tmp_path, f'[ "$1" = b ] && {{ sleep 1000 & wait; }}; cd {tmp_path}; exec sh -c "true"'
    )
    where, start = site(tmp_path, hosts=["a", "b"], ssh=ssh), time.monotonic()
    assert run("launch", "--on=ssh", *flags, where) == Exit.BAD_INPUT
    assert (
        "b is not ready: no answer in 3 s; edit cluster.hosts, ssh or port"
        in capsys.readouterr().err
    )
    assert time.monotonic() - start < 30 and not list(tmp_path.glob("runs/*/*"))
    one = SSH.status(record(hosts=["a", "b"], ssh=ssh), tmp_path)
    assert one == "a: running\nb: no answer in 3 s"


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
        files = {
            file.name: file.read_text()
            for file in (first.run / "launch").iterdir()
            if file.suffix != ".log"
        }
        os.environ["DIST_RUN_ID"] = first.run.name
        for on in ("ssh", "torchrun"):
            assert (
                main(["launch", f"--on={on}", *flags, *LONG]) == Exit.BAD_INPUT
            )  # `run` names another run
            error = capsys.readouterr().err
            assert f"{first.run} is running: `" in error and "launch stop" in error
        assert all(
            (first.run / "launch" / name).read_text() == text for name, text in files.items()
        )
        assert (
            run("launch", "status", str(first.run)) == 0
            and "this machine: running" in capsys.readouterr().out
        )
        assert run("launch", "stop", str(first.run)) == 0
        assert first.end() == Exit.REQUEUE
    finally:
        first.process.kill()
