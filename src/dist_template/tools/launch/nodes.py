"""Starts RUN/launch/node.sh on every node, over ssh or here, and waits for all of them.

status, logs, stop      from RUN/launch/node-<number>.pid and .log
exit codes              one of all nodes, as errors.Exit.of_all combines them
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from ...errors import Ended, Exit, InputError, first_line
from .job import Job, exports

SCRIPT = "node.sh"
OTHERS_S = 60.0  # for the other nodes to exit after the first one has, as `srun --wait=60`
LOST = 255  # ssh's own exit code: the connection failed or was lost


def script(job: Job, target: str, start: str, environment: dict[str, str]) -> dict[str, str]:
    """Returns the script of a node, which replaces itself with the command `start`.

    Its first argument is the node's number.
    """
    return {
        SCRIPT: f"""#!/usr/bin/env bash
# One node of {job.run_id}, by {target}: node.sh NUMBER
set -euo pipefail
cd {shlex.quote(str(job.folder))}
export NODE_RANK=$1
{exports({**job.environment, **environment})}
echo $$ >{shlex.quote(str(job.run / "launch"))}/node-"$1".pid
exec {start}
"""
    }


def arguments(job: Job) -> list[str]:
    """Returns the job's arguments; no scheduler watches the time limit, so the run does."""
    if job.site.time_limit_s is None:
        return job.arguments
    seconds = job.site.time_limit_s - job.site.save_s
    hours, rest = divmod(seconds, 3600)
    limit = f"{hours // 24:02}:{hours % 24:02}:{rest // 60:02}:{rest % 60:02}"
    return [*job.arguments, f"--preemption.max_time={limit}"]


def check(job: Job) -> None:
    """Checks that several nodes have names.

    Raises:
        InputError: they have none.
    """
    if job.nodes > 1 and not job.hosts:
        raise InputError(f"the job has {job.nodes} nodes; name them in cluster.hosts or hostfile")


def words(record: dict[str, Any], node: int, command: str) -> list[str]:
    """Returns the words that run a shell command on a node."""
    if not record["hosts"]:
        return ["bash", "-c", command]
    return [*shlex.split(record["ssh"]), record["hosts"][node], command]


def probe(job: Job) -> None:
    """Checks on every node that it is reachable, and has the project and the interpreter.

    The first one must have the port free, too.

    Raises:
        InputError: naming the first node that lacks something.
    """
    record = {"hosts": job.hosts, "ssh": job.site.ssh}
    python, folder = shlex.quote(job.python), shlex.quote(str(job.run / "launch"))
    for node, host in enumerate(job.hosts or ["this machine"]):
        bind = f'import socket; socket.create_server(("", {job.port}))' if node == 0 else "pass"
        checks = {
            f"has no folder {job.folder}": f"cd {shlex.quote(str(job.folder))}",
            f"cannot run {job.python} with dist_template": f"{python} -c 'import dist_template'",
            f"has port {job.port} in use; set cluster.port": f"{python} -c {shlex.quote(bind)}",
            f"cannot write {job.run}": f"mkdir -p {folder}",
        }
        steps = [f"{{ {step} || exit {10 + n}; }}" for n, step in enumerate(checks.values())]
        command = exports(job.environment) + "\n" + " && ".join(steps)
        done = subprocess.run(
            words(record, node, command), capture_output=True, text=True, check=False
        )
        if 10 <= done.returncode < 10 + len(checks):
            why = list(checks)[done.returncode - 10]
            raise InputError(f"{host} {why}")
        if done.returncode:
            why = first_line(done.stderr) or f"exit code {done.returncode}"
            raise InputError(
                f"cluster.hosts: {host} cannot be reached by `{job.site.ssh} {host}`: {why}"
            )


class Nodes:
    """The started scripts of all nodes."""

    def __init__(self, record: dict[str, Any], folder: Path, number: int) -> None:
        self.record, self.folder = record, folder
        command = f"bash {shlex.quote(str(folder / SCRIPT))}"
        self.processes: list[subprocess.Popen[str]] = []
        for node in range(number):
            self.processes.append(
                subprocess.Popen(
                    words(record, node, f"{command} {node}"),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C reaches the nodes by `forward` alone
                )
            )
        self.readers = [
            threading.Thread(target=self._read, args=(node,), daemon=True) for node in range(number)
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, node: int) -> None:
        """Writes a node's output into its log; shows it after the name of its host."""
        prefix = f"{self.record['hosts'][node]}: " if len(self.processes) > 1 else ""
        stream: Any = self.processes[node].stdout
        with (self.folder / f"node-{node}.log").open("a", encoding="utf-8") as log:
            for line in stream:
                log.write(line)
                log.flush()
                print(prefix + line, end="", flush=True)

    def forward(self, number: int, _: object = None) -> None:
        """Sends a signal to all nodes."""
        send(self.record, self.folder, number)

    def wait(self, is_elastic: bool) -> Exit:
        """Waits for all nodes, and returns one code for all."""
        deadline = float("inf")
        while any(process.poll() is None for process in self.processes):
            if any(process.poll() is not None for process in self.processes) and not is_elastic:
                deadline = min(deadline, time.monotonic() + OTHERS_S)
            if time.monotonic() > deadline:
                self.forward(signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.1)
        for reader in self.readers:
            reader.join()
        codes = [process.returncode for process in self.processes]
        if is_elastic and Exit.DONE in codes:
            return Exit.DONE
        # 128 + the number of a signal, by a shell; ssh's own code is a lost node
        return Exit.of_all(128 - code if code > Exit.INTERRUPTED else code for code in codes)


def send(record: dict[str, Any], folder: Path, number: int) -> list[str]:
    """Sends a signal to the process of each node's script; returns a line for each."""
    found = []
    for node, host in enumerate(record["hosts"] or ["this machine"]):
        file = shlex.quote(str(folder / f"node-{node}.pid"))
        command = f'kill -{number} "$(cat {file})"'
        done = subprocess.run(words(record, node, command), capture_output=True, check=False)
        found.append(f"{host}: {'no process' if done.returncode else 'sent'}")
    return found


def submit(job: Job, folder: Path) -> str:
    """Starts all nodes, forwards signals to them, and waits for their end.

    Raises:
        InputError: a node, or the data, is not ready.
        Ended: the run has ended with another code than 0.
    """
    job.require_data()
    probe(job)
    started = Nodes({"hosts": job.hosts, "ssh": job.site.ssh}, folder, job.nodes)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, started.forward)
    if code := started.wait(job.site.min_nodes is not None):
        raise Ended(code, f"the nodes ended with code {code:d}")
    return ""


def status(record: dict[str, Any], folder: Path) -> str:
    """Returns for each node whether its process is there."""
    lines = send(record, folder, 0)
    return "\n".join(line.replace(": sent", ": running") for line in lines)


def logs(record: dict[str, Any], folder: Path) -> str:
    """Returns the output of all nodes."""
    found = sorted(folder.glob("node-*.log"))
    return "\n".join(f"{path}\n{path.read_text(encoding='utf-8')}" for path in found)


def stop(record: dict[str, Any], folder: Path) -> str:
    """Sends SIGTERM to all nodes, whose ranks save and exit with 75."""
    return "\n".join(send(record, folder, signal.SIGTERM))
