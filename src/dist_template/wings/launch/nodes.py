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

from ...cluster.launch import Variable
from ...cluster.signals import STOP
from ...errors import Ended, Exit, InputError
from ...project import program
from .job import Job, exports
from .targets import Record, Target

Process = subprocess.Popen[str]
HERE, RUNNING, NO_ANSWER = "this machine", "running", "no answer"
ANSWER_S = 60.0  # for a host to log in and start Python, or to signal a process
OTHERS_S = 60.0  # for the other nodes to exit after the first one has, as `srun --wait=60`


class OnNodes(Target):
    """Base of the targets that start node.sh, which `script` renders, on every host or here."""

    on_hosts = True

    def commands(self, job: Job) -> list[list[str]]:
        """Returns the command that starts each node."""
        start = shlex.join(["bash", str(job.files / "node.sh")])
        hosts = job.hosts or [HERE]
        return [_on_host(host, job.site.ssh, f"{start} {node}") for node, host in enumerate(hosts)]

    def check(self, job: Job) -> None:
        """Raises InputError if the run is active, or a node or the data is not ready."""
        job.require_data()
        if job.files.exists() and any(RUNNING in line for line in _send(job.hosts, job.site.ssh, job.files, 0)):
            what = f"`{program('launch')} stop {job.run}` ends it; or set another {Variable.RUN_ID}"
            raise InputError(f"{job.run} is running: {what}")
        for node, host in enumerate(job.hosts or [HERE]):
            _probe(job, host, job.port if node == 0 else 0)

    def submit(self, job: Job) -> str:
        """Starts all nodes, shows their output, forwards signals, and waits for their end.

        Raises:
            Ended: the run has ended with another code than 0.
        """
        nodes, readers = [], []
        for node, words in enumerate(self.commands(job)):
            nodes.append(_start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            readers.append(Thread(target=_show, args=(job, node, nodes[node])))
            readers[node].start()
        for number in (*STOP, signal.SIGINT):
            signal.signal(number, lambda number, _: send_signal(job, nodes, number))
        wait(job, nodes)
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

    def status(self, record: Record, folder: Path) -> str:
        """Returns for each node whether its process runs."""
        return "\n".join(_send(record["hosts"], record["ssh"], folder, 0))

    def stop(self, record: Record, folder: Path) -> str:
        """Sends SIGTERM to the processes, which save and exit with 75; returns who had one."""
        return "\n".join(_send(record["hosts"], record["ssh"], folder, signal.SIGTERM))


def script(job: Job, start: str, environment: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the script of a node, which replaces itself with the command `start`."""
    text = f"""#!/usr/bin/env bash
# Node $1 of run {job.run_id}.
set -euo pipefail
cd {shlex.quote(str(job.folder))}
export NODE_RANK=$1
{exports({**(environment or {}), **job.environment})}
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


def wait(job: Job, nodes: list[Process]) -> None:
    """Waits for all nodes. When one has exited, the others have OTHERS_S; then they are killed.

    The nodes of an elastic run may exit while others train on, until one has finished."""
    deadline = float("inf")
    while None in (codes := [node.poll() for node in nodes]):
        has_exited = any(code is not None for code in codes)
        if has_exited and (job.site.min_nodes is None or Exit.DONE in codes):
            deadline = min(deadline, time.monotonic() + OTHERS_S)
        if time.monotonic() > deadline:
            send_signal(job, nodes, signal.SIGKILL)
            deadline = time.monotonic() + OTHERS_S
        time.sleep(0.1)


def send_signal(job: Job, nodes: list[Process], number: int) -> None:
    """Sends a signal to the nodes' processes, and ends the connection to a host that is lost."""
    for node, line in zip(nodes, _send(job.hosts, job.site.ssh, job.files, number), strict=True):
        has_no_process = number == signal.SIGKILL and not line.endswith(RUNNING)
        if (has_no_process or NO_ANSWER in line) and node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)


def _on_host(host: str, ssh: str, command: str) -> list[str]:
    return ["bash", "-c", command] if host == HERE else [*shlex.split(ssh), host, command]


def _start(words: list[str], **streams: Any) -> Process:
    """Starts a process in its own session: Ctrl-C reaches the nodes by `_send` alone."""
    streams |= {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    return subprocess.Popen(words, start_new_session=True, **streams)


def _probe(job: Job, host: str, port: int) -> None:
    """Raises InputError if a node is not reachable, lacks something, or its port is in use."""
    test = f"import dist_template, socket; socket.create_server(('', {port}))"
    folder, runs = shlex.quote(str(job.folder)), shlex.quote(str(job.run.parent))
    python = shlex.join([job.python, "-c", test])
    command = f"{exports(job.environment)}\ncd {folder} && mkdir -p {runs} && test -w {runs} && {python}"
    try:
        started = _start(_on_host(host, job.site.ssh, command), stderr=subprocess.PIPE)
    except OSError as error:
        raise InputError(f"cluster.ssh {job.site.ssh!r} cannot be run: {error}") from error
    try:
        lines = started.communicate(timeout=ANSWER_S)[1].splitlines()
        why = lines[-1] if lines else f"exit code {started.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        why = f"{NO_ANSWER} in {ANSWER_S:g} s"
    if started.wait():
        raise InputError(f"{host} is not ready: {why}; edit cluster.hosts, ssh or port")


def _show(job: Job, node: int, process: Process) -> None:
    """Writes a node's output into its log, and prints it after the name of its host."""
    prefix = f"{job.hosts[node]}: " if len(job.hosts) > 1 else ""
    with (job.files / f"node-{node}.log").open("a", encoding="utf-8", buffering=1) as log:
        for line in process.stdout or ():
            log.write(line)
            print(prefix + line, end="", flush=True)


def _send(hosts: list[str], ssh: str, folder: Path, number: int) -> list[str]:
    """Sends a signal to each node's process; 0 only asks for it. Returns a line for each node.

    Another process may have the number by now: the process of the run has its id in the environment."""
    started, run = {}, shlex.quote(f"{Variable.RUN_ID}={folder.parent.name}")
    for node, host in enumerate(hosts or [HERE]):
        read = f"read -r pid <{shlex.quote(str(folder))}/node-{node}.pid"
        is_run = f'grep -zqxF -- {run} "/proc/$pid/environ"'
        command = shlex.join(["sh", "-c", f'{read} && {is_run} && kill -{number:d} "$pid"'])
        started[host] = _start(_on_host(host, ssh, command), stderr=subprocess.DEVNULL)
    deadline, lines = time.monotonic() + ANSWER_S, []
    for host, process in started.items():
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
            lines.append(f"{host}: {'no process' if code else RUNNING}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            lines.append(f"{host}: {NO_ANSWER} in {ANSWER_S:g} s")
    return lines
