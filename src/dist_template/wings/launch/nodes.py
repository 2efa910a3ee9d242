"""Starts RUN/launch/node.sh on every node, by ssh or here, and waits for all of them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from threading import Thread
from typing import Any

from ...cluster.signals import STOP
from ...errors import Ended, Exit, InputError
from .job import Job, exports

RUNNING, NO_ANSWER = "running", "no answer"
RANKS = "dist_template.wings.launch.ranks"  # runs another library's launcher
ANSWER_S = 60.0  # for a host to log in and start Python, or to signal a process
# Prints when process $1 was started, and of which boot: a number alone may be another process's.
IDENTITY = """identity() {
  { stat=$(cat "/proc/$1/stat") && set -- ${stat##*) } &&
    echo "${20} $(cat /proc/sys/kernel/random/boot_id)"; } 2>/dev/null
}"""
OTHERS_S = 60.0  # for the other nodes to exit after the first one has, as `srun --wait=60`


def script(job: Job, start: str, environment: dict[str, str]) -> dict[str, str]:
    """Returns the script of a node, which replaces itself with the command `start`.

    Raises:
        InputError: several nodes have no names.
    """
    if job.nodes > 1 and not job.hosts:
        raise InputError(f"the job has {job.nodes} nodes; name them in cluster.hosts or hostfile")
    text = f"""#!/usr/bin/env bash
# Node $1 of run {job.run_id}.
set -euo pipefail
cd {shlex.quote(str(job.folder))}
export NODE_RANK=$1
{exports({**environment, **job.environment})}
{IDENTITY}
echo "$$ $(identity $$)" >{shlex.quote(str(job.files))}/node-"$1".pid
exec {start}
"""
    return {"node.sh": text}


def arguments(job: Job) -> list[str]:
    """Returns the job's arguments; no scheduler watches the time limit, so the run does."""
    if (limit := job.site.time_limit_s) is None:
        return job.arguments
    minutes, seconds = divmod(limit - job.site.save_s, 60)
    time = f"{minutes // 1440:02}:{minutes // 60 % 24:02}:{minutes % 60:02}:{seconds:02}"
    return [*job.arguments, f"--preemption.max_time={time}"]


def submit(job: Job, folder: Path) -> str:
    """Starts all nodes, shows their output, forwards signals, and waits for their end.

    Raises:
        InputError: a node, or the data, is not ready.
        Ended: the run has ended with another code than 0.
    """
    job.require_data()
    for node in range(job.nodes):
        _probe(job, node)
    nodes = [_start(job, node) for node in range(job.nodes)]
    readers = [Thread(target=_show, args=(job, *each)) for each in enumerate(nodes)]
    for reader in readers:
        reader.start()
    for number in (*STOP, signal.SIGINT):
        signal.signal(number, lambda number, _: _signal(job, nodes, folder, number))
    is_elastic = job.site.min_nodes is not None
    _wait(job, nodes, is_elastic, folder)
    for reader in readers:
        reader.join()
    # 128 + a signal's number is a shell's; 255 is ssh's for a lost connection.
    codes = [node.returncode for node in nodes]
    codes = [128 - code if code > Exit.INTERRUPTED else code for code in codes]
    if (code := Exit.of_all(codes)) and not (is_elastic and Exit.DONE in codes):
        raise Ended(code, f"the nodes ended with code {code:d}")
    return ""


def _wait(job: Job, nodes: list[Any], is_elastic: bool, folder: Path) -> None:
    """Waits for all nodes. When one has exited, the others have OTHERS_S; then they are killed.

    The nodes of an elastic run may exit while others train on, until one has finished."""
    deadline = float("inf")
    while any(running := [node.poll() is None for node in nodes]):
        is_ending = not is_elastic or Exit.DONE in [node.returncode for node in nodes]
        if not all(running) and is_ending:
            deadline = min(deadline, time.monotonic() + OTHERS_S)
        if time.monotonic() > deadline:
            _signal(job, nodes, folder, signal.SIGKILL)
            deadline = time.monotonic() + OTHERS_S
        time.sleep(0.1)


def _signal(job: Job, nodes: list[Any], folder: Path, number: int) -> None:
    """Sends a signal to the nodes' processes, and ends the connection to a host that is lost."""
    lines = _send(job.hosts, job.site.ssh, folder, number)
    for node, line in zip(nodes, lines, strict=True):
        is_left = number == signal.SIGKILL and not line.endswith(RUNNING)  # without its process
        if (is_left or NO_ANSWER in line) and node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)


def commands(job: Job) -> list[list[str]]:
    """Returns the command that starts each node."""
    started = [shlex.join(["bash", str(job.files / "node.sh"), str(n)]) for n in range(job.nodes)]
    return [_words(job.hosts, job.site.ssh, node, text) for node, text in enumerate(started)]


def _words(hosts: list[str], ssh: str, node: int, command: str) -> list[str]:
    return [*shlex.split(ssh), hosts[node], command] if hosts else ["bash", "-c", command]


def _run(words: list[str], **options: Any) -> Any:
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, text=True, **options)


def _probe(job: Job, node: int) -> None:
    """Raises InputError if a node is not reachable, lacks something, or its port is in use."""
    port = job.port if node == 0 else 0
    test = f"import dist_template, socket; socket.create_server(('', {port}))"
    python = shlex.join([job.python, "-c", test])
    steps = (
        f"cd {shlex.quote(str(job.folder))} && mkdir -p {shlex.quote(str(job.files))} && {python}"
    )
    command = f"{exports(job.environment)}\n{steps}"
    try:
        started = _run(
            _words(job.hosts, job.site.ssh, node, command),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise InputError(f"cluster.ssh {job.site.ssh!r} cannot be run: {error}") from error
    try:
        lines = started.communicate(timeout=ANSWER_S)[1].splitlines()
        why = lines[-1] if lines else f"exit code {started.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        why = f"{NO_ANSWER} in {ANSWER_S:g} s"
    if started.wait():
        host = job.hosts[node] if job.hosts else "this machine"
        raise InputError(f"{host} is not ready: {why}; edit cluster.hosts, ssh or port")


def _start(job: Job, node: int) -> Any:
    # Ctrl-C reaches the nodes by `_send` alone.
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    return _run(commands(job)[node], errors="replace", **options)


def _show(job: Job, node: int, process: Any) -> None:
    """Writes a node's output into its log, and prints it after the name of its host."""
    prefix = f"{job.hosts[node]}: " if job.nodes > 1 else ""
    with (job.files / f"node-{node}.log").open("a", encoding="utf-8", buffering=1) as log:
        for line in process.stdout:
            log.write(line)
            print(prefix + line, end="", flush=True)


def _send(hosts: list[str], ssh: str, folder: Path, number: int) -> list[str]:
    """Sends a signal to each node's process; 0 only asks for it. Returns a line for each node."""
    names, started = hosts or ["this machine"], []
    for node in range(len(names)):
        file = f"{shlex.quote(str(folder))}/node-{node}.pid"
        same = f'read -r pid since <{file} && [ "$(identity "$pid")" = "$since" ]'
        command = shlex.join(["sh", "-c", f'{IDENTITY}\n{same} && kill -{number:d} "$pid"'])
        quiet = {"stderr": subprocess.DEVNULL, "start_new_session": True}
        started.append(_run(_words(hosts, ssh, node, command), **quiet))
    deadline, lines = time.monotonic() + ANSWER_S, []
    for name, each in zip(names, started, strict=True):
        try:
            code = each.wait(max(0.0, deadline - time.monotonic()))
            lines.append(f"{name}: {'no process' if code else RUNNING}")
        except subprocess.TimeoutExpired:
            os.killpg(each.pid, signal.SIGKILL)
            lines.append(f"{name}: {NO_ANSWER} in {ANSWER_S:g} s")
    return lines


def is_active(record: dict[str, Any], folder: Path) -> bool:
    """Returns whether a node's process runs."""
    return any(line.endswith(RUNNING) for line in _send(record["hosts"], record["ssh"], folder, 0))


def status(record: dict[str, Any], folder: Path, number: int = 0) -> str:
    """Returns for each node whether its process runs."""
    return "\n".join(_send(record["hosts"], record["ssh"], folder, number))


def stop(record: dict[str, Any], folder: Path) -> str:
    """Sends SIGTERM to the processes, which save and exit with 75; returns who had one."""
    return status(record, folder, signal.SIGTERM)


def logs(record: dict[str, Any], folder: Path) -> str:
    """Returns the output of all nodes or tasks."""
    files = sorted(folder.glob("*.log"))
    return "\n".join(f"{file}:\n{file.read_text(encoding='utf-8')}" for file in files)
