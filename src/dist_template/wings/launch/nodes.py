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
from .targets import Record, Target

Process = subprocess.Popen[str]
RUNNING, NO_ANSWER = "running", "no answer"
ANSWER_S = 60.0  # for a host to log in and start Python, or to signal a process
# Prints the start of process $1 and the boot's id: its number alone may be another process's.
IDENTITY = """identity() {
  { stat=$(cat "/proc/$1/stat") && set -- ${stat##*) } &&
    echo "${20} $(cat /proc/sys/kernel/random/boot_id)"; } 2>/dev/null
}"""
OTHERS_S = 60.0  # for the other nodes to exit after the first one has, as `srun --wait=60`


class OnNodes(Target):
    """Base of the targets that start node.sh, which `script` renders, on every node."""

    on_hosts = True

    def commands(self, job: Job) -> list[list[str]]:
        """Returns the command that starts each node."""
        start = shlex.join(["bash", str(job.files / "node.sh")])
        nodes = range(job.nodes)
        return [_on_node(job.hosts, job.site.ssh, node, f"{start} {node}") for node in nodes]

    def submit(self, job: Job, folder: Path) -> str:
        """Starts all nodes, shows their output, forwards signals, and waits for their end.

        Raises:
            InputError: a node, or the data, is not ready.
            Ended: the run has ended with another code than 0.
        """
        job.require_data()
        for node in range(job.nodes):
            _probe(job, node)
        nodes, readers = [], []
        for node, words in enumerate(self.commands(job)):
            nodes.append(_start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            readers.append(Thread(target=_show, args=(job, node, nodes[node])))
            readers[node].start()
        for number in (*STOP, signal.SIGINT):
            signal.signal(number, lambda number, _: send_signal(job, nodes, folder, number))
        wait(job, nodes, folder)
        for reader in readers:
            reader.join()
        codes = []
        for node in nodes:  # 128 + a signal's number is a shell's; 255 is ssh's, connection lost
            code = node.returncode
            codes.append(128 - code if code > Exit.INTERRUPTED else code)
        code = Exit.of_all(codes)
        if code and not (job.site.min_nodes and Exit.DONE in codes):
            raise Ended(code, f"the nodes ended with code {code:d}")
        return ""

    def is_active(self, record: Record, folder: Path) -> bool:
        """Returns whether a node's process runs."""
        return f": {RUNNING}" in self.status(record, folder)

    def status(self, record: Record, folder: Path) -> str:
        """Returns for each node whether its process runs."""
        return "\n".join(_send(record["hosts"], record["ssh"], folder, 0))

    def stop(self, record: Record, folder: Path) -> str:
        """Sends SIGTERM to the processes, which save and exit with 75; returns who had one."""
        return "\n".join(_send(record["hosts"], record["ssh"], folder, signal.SIGTERM))


def script(job: Job, start: str, environment: dict[str, str] | None = None) -> dict[str, str]:
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
{exports({**(environment or {}), **job.environment})}
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


def wait(job: Job, nodes: list[Process], folder: Path) -> None:
    """Waits for all nodes. When one has exited, the others have OTHERS_S; then they are killed.

    The nodes of an elastic run may exit while others train on, until one has finished."""
    deadline = float("inf")
    while None in (codes := [node.poll() for node in nodes]):
        has_exited = any(code is not None for code in codes)
        if has_exited and (job.site.min_nodes is None or Exit.DONE in codes):
            deadline = min(deadline, time.monotonic() + OTHERS_S)
        if time.monotonic() > deadline:
            send_signal(job, nodes, folder, signal.SIGKILL)
            deadline = time.monotonic() + OTHERS_S
        time.sleep(0.1)


def send_signal(job: Job, nodes: list[Process], folder: Path, number: int) -> None:
    """Sends a signal to the nodes' processes, and ends the connection to a host that is lost."""
    for node, line in zip(nodes, _send(job.hosts, job.site.ssh, folder, number), strict=True):
        has_no_process = number == signal.SIGKILL and not line.endswith(RUNNING)
        if (has_no_process or NO_ANSWER in line) and node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)


def _on_node(hosts: list[str], ssh: str, node: int, command: str) -> list[str]:
    return [*shlex.split(ssh), hosts[node], command] if hosts else ["bash", "-c", command]


def _start(words: list[str], **streams: Any) -> Process:
    """Starts a process in its own session: Ctrl-C reaches the nodes by `_send` alone."""
    streams |= {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    return subprocess.Popen(words, start_new_session=True, **streams)


def _probe(job: Job, node: int) -> None:
    """Raises InputError if a node is not reachable, lacks something, or its port is in use."""
    port = job.port if node == 0 else 0
    test = f"import dist_template, socket; socket.create_server(('', {port}))"
    folder, files = shlex.quote(str(job.folder)), shlex.quote(str(job.files))
    python = shlex.join([job.python, "-c", test])
    command = f"{exports(job.environment)}\ncd {folder} && mkdir -p {files} && {python}"
    words = _on_node(job.hosts, job.site.ssh, node, command)
    try:
        started = _start(words, stderr=subprocess.PIPE)
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


def _show(job: Job, node: int, process: Process) -> None:
    """Writes a node's output into its log, and prints it after the name of its host."""
    prefix = f"{job.hosts[node]}: " if job.nodes > 1 else ""
    with (job.files / f"node-{node}.log").open("a", encoding="utf-8", buffering=1) as log:
        for line in process.stdout or ():
            log.write(line)
            print(prefix + line, end="", flush=True)


def _send(hosts: list[str], ssh: str, folder: Path, number: int) -> list[str]:
    """Sends a signal to each node's process; 0 only asks for it. Returns a line for each node."""
    started = {}
    for node, name in enumerate(hosts or ["this machine"]):
        file = f"{shlex.quote(str(folder))}/node-{node}.pid"
        same = f'read -r pid since <{file} && [ "$(identity "$pid")" = "$since" ]'
        command = shlex.join(["sh", "-c", f'{IDENTITY}\n{same} && kill -{number:d} "$pid"'])
        words = _on_node(hosts, ssh, node, command)
        started[name] = _start(words, stderr=subprocess.DEVNULL)
    deadline, lines = time.monotonic() + ANSWER_S, []
    for name, process in started.items():
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
            lines.append(f"{name}: {'no process' if code else RUNNING}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            lines.append(f"{name}: {NO_ANSWER} in {ANSWER_S:g} s")
    return lines
