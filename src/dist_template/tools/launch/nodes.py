"""Starts RUN/launch/node.sh on every node, by ssh or here, and waits for all of them."""

from __future__ import annotations

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

RANKS = "dist_template.tools.launch.ranks"  # runs another library's launcher
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
echo $$ >{shlex.quote(str(job.files))}/node-"$1".pid
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
        signal.signal(number, lambda number, _: _send(job.hosts, job.site.ssh, folder, number))
    is_elastic, deadline = job.site.min_nodes is not None, float("inf")
    while any(running := [node.poll() is None for node in nodes]):
        if not all(running) and not is_elastic:
            deadline = min(deadline, time.monotonic() + OTHERS_S)
        if time.monotonic() > deadline:
            _send(job.hosts, job.site.ssh, folder, signal.SIGKILL)
            deadline = time.monotonic() + OTHERS_S
        time.sleep(0.1)
    for reader in readers:
        reader.join()
    # 128 + a signal's number is a shell's; 255 is ssh's for a lost connection.
    codes = [node.returncode for node in nodes]
    codes = [128 - code if code > Exit.INTERRUPTED else code for code in codes]
    if (code := Exit.of_all(codes)) and not (is_elastic and Exit.DONE in codes):
        raise Ended(code, f"the nodes ended with code {code:d}")
    return ""


def _run_on(hosts: list[str], ssh: str, node: int, command: str, **options: Any) -> Any:
    """Starts a shell command on a node."""
    words = [*shlex.split(ssh), hosts[node], command] if hosts else ["bash", "-c", command]
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
        started = _run_on(job.hosts, job.site.ssh, node, command, stderr=subprocess.PIPE)
    except OSError as error:
        raise InputError(f"cluster.ssh {job.site.ssh!r} cannot be run: {error}") from error
    lines = started.communicate()[1].splitlines()
    if started.returncode:
        host = job.hosts[node] if job.hosts else "this machine"
        why = lines[-1] if lines else f"exit code {started.returncode}"
        raise InputError(f"{host} is not ready: {why}; edit cluster.hosts, ssh or port")


def _start(job: Job, node: int) -> Any:
    command = shlex.join(["bash", str(job.files / "node.sh"), str(node)])
    # Ctrl-C reaches the nodes by `_send` alone.
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    return _run_on(job.hosts, job.site.ssh, node, command, errors="replace", **options)


def _show(job: Job, node: int, process: Any) -> None:
    """Writes a node's output into its log, and prints it after the name of its host."""
    prefix = f"{job.hosts[node]}: " if job.nodes > 1 else ""
    with (job.files / f"node-{node}.log").open("a", encoding="utf-8", buffering=1) as log:
        for line in process.stdout:
            log.write(line)
            print(prefix + line, end="", flush=True)


def _send(hosts: list[str], ssh: str, folder: Path, number: int) -> list[str]:
    """Sends a signal to each node's process; 0 only asks for it. Returns a line for each node."""
    lines = []
    for node, host in enumerate(hosts or ["this machine"]):
        command = f'kill -{number:d} "$(cat {shlex.quote(str(folder))}/node-{node}.pid)"'
        sent = _run_on(hosts, ssh, node, command, stderr=subprocess.DEVNULL).wait() == 0
        lines.append(f"{host}: {'running' if sent else 'no process'}")
    return lines


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
