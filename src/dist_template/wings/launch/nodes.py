"""Starts RUN/launch/node.sh on every node, by ssh or here, and waits for all of them.

`check` asks each node whether the run is active, and whether its port is free and its folder can be
written. `submit` starts all nodes, shows and logs their output, forwards signals by the process
number that node.sh has written, and returns when all have ended.

When a node is lost, ssh ends (ServerAliveInterval), and the run's watchdog ends the other nodes."""

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
from .job import Job, exports, project_file
from .targets import Record, Target

Process = subprocess.Popen[str]
HERE, RUNNING = "this machine", "running"
ANSWER_S = 60.0  # for a host to log in and start Python, or to signal a process


class OnNodes(Target):
    """Base of the targets that start node.sh, which `script` renders, on every host or here."""

    on_hosts = True

    def commands(self, job: Job) -> list[list[str]]:
        start = shlex.join(["bash", str(job.files / "node.sh")])
        hosts = job.hosts or [HERE]
        return [_on_host(host, job.site.ssh, f"{start} {node}") for node, host in enumerate(hosts)]

    def check(self, job: Job) -> None:
        """Raises InputError if the run is active, or a node or the data is not ready."""
        job.require_data()
        if job.files.exists():
            states = _send(job.hosts, job.site.ssh, job.files, 0)
            if any(RUNNING in state for state in states):
                stop = f"{program('launch')} stop {shlex.quote(str(job.run))}"
                cure = f"`{stop}` ends it; or set another {Variable.RUN_ID}"
                raise InputError(f"{job.run} is running: {cure}")
        folder, runs = shlex.quote(str(job.folder)), shlex.quote(str(job.run.parent))
        writes = f"cd {folder} && mkdir -p {runs} && test -w {runs}"
        commands = []
        for node in range(max(1, len(job.hosts))):
            port = job.port if node == 0 else 0  # the first node's is the rendezvous; 0: any
            test = f"import dist_template, socket; socket.create_server(('', {port}))"
            listens = shlex.join([job.python, "-c", test])
            commands.append(f"{exports(job.environment)}\n{writes} && {listens}")
        for host, code, last_line in _on_all(job.hosts, job.site.ssh, commands):
            if code != 0:
                raise InputError(
                    f"{host} is not ready: {last_line}; edit cluster.hosts, ssh or port"
                )

    def submit(self, job: Job) -> str:
        """Starts all nodes, shows their output, forwards signals, and waits for their end."""
        processes, readers = [], []
        for node, words in enumerate(self.commands(job)):
            process = _start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            reader = Thread(target=_show, args=(job, node, process))
            reader.start()
            processes.append(process)
            readers.append(reader)

        def forward(number: int, _: object) -> None:
            _send(job.hosts, job.site.ssh, job.files, number)

        for number in (*STOP, signal.SIGINT):
            signal.signal(number, forward)
        codes = []
        for process, reader in zip(processes, readers, strict=True):
            reader.join()
            code = process.wait()
            # A shell exits with 128 + the number of the signal that ended its command, and ssh
            # with 255 for a lost connection: both count as an end by a signal.
            if code > Exit.INTERRUPTED:
                code = 128 - code
            codes.append(code)
        code = Exit.of_all(codes)
        if code and not (job.site.min_nodes and Exit.DONE in codes):
            raise Ended(code, f"the nodes ended with code {code:d}")
        return ""

    def status(self, record: Record, folder: Path) -> str:
        return "\n".join(_send(record["hosts"], record["ssh"], folder, 0))

    def stop(self, record: Record, folder: Path) -> str:
        return "\n".join(_send(record["hosts"], record["ssh"], folder, signal.SIGTERM))


class Ssh(OnNodes):
    """A process on each node, whose Lightning starts the node's other processes."""

    def render(self, job: Job) -> dict[str, str]:
        rendezvous = {"MASTER_ADDR": job.master, "MASTER_PORT": str(job.port)}
        start = shlex.join([job.python, "-m", job.package, *arguments(job)])
        return script(job, start, rendezvous)


class Torchrun(OnNodes):
    """launch/torchrun.sh on every node, with this run's settings."""

    def render(self, job: Job) -> dict[str, str]:
        start = f"bash {project_file('launch/torchrun.sh')} {shlex.join(arguments(job))}"
        nodes = str(job.nodes)
        if job.site.min_nodes:
            nodes = f"{job.site.min_nodes}:{job.nodes}"
        settings = {"PYTHON": job.python, "DIST_PACKAGE": job.package, "NPROC": str(job.devices)}
        settings["NNODES"] = nodes
        if nodes != "1":
            settings["RDZV_ENDPOINT"] = f"{job.master}:{job.port}"
        return script(job, start, settings)


def script(job: Job, start: str, environment: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the script of a node, which replaces itself with the command `start`. What the user
    sets in cluster.environment overrides `environment`."""
    variables = (environment or {}) | job.environment
    text = f"""#!/usr/bin/env bash
# Node $1 of run {job.run.name}.
set -euo pipefail
cd {shlex.quote(str(job.folder))}
export NODE_RANK=$1
{exports(variables)}
echo $$ >{shlex.quote(str(job.files))}/node-"$1".pid
exec {start}
"""
    return {"node.sh": text}


def arguments(job: Job) -> list[str]:
    """Returns the job's arguments; no scheduler watches the time limit, so the run does."""
    limit = job.site.time_limit_s
    if limit is None:
        return job.arguments
    minutes, seconds = divmod(limit - job.site.save_s, 60)
    time = f"{minutes // 1440:02}:{minutes // 60 % 24:02}:{minutes % 60:02}:{seconds:02}"
    return [*job.arguments, f"--preemption.max_time={time}"]


def _on_host(host: str, ssh: str, command: str) -> list[str]:
    if host == HERE:
        return ["bash", "-c", command]
    return [*shlex.split(ssh), host, command]


def _start(words: list[str], **streams: Any) -> Process:
    """Starts a process in its own session: Ctrl-C reaches the nodes by `_send` alone."""
    streams |= {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    return subprocess.Popen(words, start_new_session=True, **streams)


def _show(job: Job, node: int, process: Process) -> None:
    """Writes a node's output into its log, and prints it after the name of its host."""
    prefix = ""
    if len(job.hosts) > 1:
        prefix = f"{job.hosts[node]}: "
    assert process.stdout is not None  # `submit` has asked for it
    with (job.files / f"node-{node}.log").open("a", encoding="utf-8", buffering=1) as log:
        for line in process.stdout:
            log.write(line)
            print(prefix + line, end="", flush=True)


def _send(hosts: list[str], ssh: str, folder: Path, number: int) -> list[str]:
    """Sends a signal to each node's process; 0 only asks for it. Returns a line for each node.
    Another process may have the number by now: the process of the run has its id in the
    environment."""
    run = shlex.quote(f"{Variable.RUN_ID}={folder.parent.name}")
    is_run = f'grep -zqxF -- {run} "/proc/$pid/environ"'
    commands = []
    for node in range(max(1, len(hosts))):
        file = f"{shlex.quote(str(folder))}/node-{node}.pid"
        # a FIFO would wait, and a text that is no number may be a path below /proc, or a group
        read = f"test -f {file} && read -r pid <{file} && case $pid in ''|*[!0-9]*) exit 1; esac"
        kill = f'kill -{number:d} "$pid"'
        commands.append(shlex.join(["sh", "-c", f"{read} && {is_run} && {kill}"]))
    lines = []
    for host, code, last_line in _on_all(hosts, ssh, commands):
        if code is None:
            state = last_line
        elif code == 0:
            state = RUNNING
        else:
            state = "no process"
        lines.append(f"{host}: {state}")
    return lines


def _on_all(hosts: list[str], ssh: str, commands: list[str]) -> list[tuple[str, int | None, str]]:
    """Runs a command on each host; returns the host, the exit code (None: no answer) and its last
    line of errors. All hosts work at the same time, and have one deadline."""
    started = []
    for host, command in zip(hosts or [HERE], commands, strict=True):
        try:
            process = _start(_on_host(host, ssh, command), stderr=subprocess.PIPE)
        except OSError as error:
            raise InputError(f"cluster.ssh {ssh!r} cannot be run: {error}") from error
        started.append((host, process))
    deadline = time.monotonic() + ANSWER_S
    answers: list[tuple[str, int | None, str]] = []
    for host, process in started:
        try:
            _, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            answers.append((host, None, f"no answer in {ANSWER_S:g} s"))
            continue
        last_line = f"exit code {process.returncode}"
        if errors:
            last_line = errors.splitlines()[-1]
        answers.append((host, process.returncode, last_line))
    return answers
