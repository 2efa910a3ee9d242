"""Signals to the processes of nodes, hosts that do not answer, and a second launch of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_template.errors import Exit
from dist_template.wings.launch import nodes
from tests.support.launched import LONG, Launched, site
from tests.support.line import main
from tests.support.runs import PROJECT, run
from tests.support.wings import launch_target as target

SSH: Any = target("ssh")
RUNNING, GONE = "this machine: running", "this machine: no process"


@pytest.fixture
def process() -> Iterator[Any]:
    environment = {**os.environ, "DIST_RUN_ID": "one.[a]"}
    with subprocess.Popen(["sleep", "1000"], env=environment) as started:
        yield started
        started.kill()


def record(**changes: Any) -> dict[str, Any]:
    return {"on": "ssh", "id": "", "hosts": [], "ssh": "ssh"} | changes


def test_a_signal_reaches_the_process_that_was_started_and_no_other(
    process: Any, tmp_path: Path
) -> None:
    others = [tmp_path / name / "launch" for name in ("two", "one", "one.[a]b", "oneX[a]")]
    for folder in [*others, mine := tmp_path / "one.[a]" / "launch"]:
        folder.mkdir(parents=True)
        (folder / "node-0.pid").write_text(f"{process.pid}\n")
    for other in others:
        assert SSH.stop(record(), other) == GONE, other
    time.sleep(0.1)
    assert process.poll() is None, "another process has the number that is in the file"
    assert SSH.stop(record(), mine) == RUNNING
    assert process.wait(10) == -signal.SIGTERM
    assert SSH.status(record(), mine) == GONE


def test_a_host_whose_login_hangs_is_named(
    flags: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(nodes, "ANSWER_S", 3.0)
    run("prepare", *flags)
    ssh = tmp_path / "fake_ssh"  # $1 is the host, $2 the command
    hangs = f'[ "$1" = b ] && {{ sleep 1000 & wait; }}; cd {tmp_path}; exec sh -c "true"'
    ssh.write_text(f"#!/bin/sh\n{hangs}\n")
    ssh.chmod(0o755)
    where, start = site(tmp_path, hosts=["a", "b"], ssh=str(ssh)), time.monotonic()
    assert run("launch", "--on=ssh", *flags, where) == Exit.BAD_INPUT
    sentence = "b is not ready: no answer in 3 s; edit cluster.hosts, ssh or port"
    assert sentence in capsys.readouterr().err
    assert time.monotonic() - start < 30 and not list(tmp_path.glob("runs/*/*"))
    status = SSH.status(record(hosts=["a", "b"], ssh=str(ssh)), tmp_path)
    assert status == "a: running\nb: no answer in 3 s"


@pytest.mark.slow
def test_a_second_launch_of_a_running_run_leaves_its_files(
    flags: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(PROJECT)
    run("prepare", *flags)
    first = Launched(tmp_path, "ssh", *flags, site(tmp_path), *LONG)
    try:
        first.reach(2)
        kept = [file for file in (first.run / "launch").iterdir() if file.suffix != ".log"]
        texts = [file.read_text() for file in kept]
        os.environ["DIST_RUN_ID"] = first.run.name
        for on in ("ssh", "torchrun"):
            argv = ["launch", f"--on={on}", *flags, *LONG]
            assert main(argv) == Exit.BAD_INPUT  # `run` names another run
            error = capsys.readouterr().err
            assert f"{first.run} is running: `" in error and "launch stop" in error
        assert [file.read_text() for file in kept] == texts
        assert run("launch", "status", str(first.run)) == 0 and RUNNING in capsys.readouterr().out
        assert run("launch", "stop", str(first.run)) == 0
        assert first.end() == Exit.REQUEUE
    finally:
        first.process.kill()
