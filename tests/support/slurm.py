"""Slurm on this machine: a real slurmctld, and three slurmd that are nodes of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

LACKING = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(name)]

CONFIG = """\
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=10
JobRequeue=1
KillWait=20
OverTimeLimit=0
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 \
Port=[{first}-{last}] CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-3] MaxTime=INFINITE State=UP PriorityTier=10
"""


class Slurm:
    """Three nodes, n1 to n3, and two partitions: jobs of `urgent` preempt jobs of `main`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, list[subprocess.Popen[bytes]]()
        self.slurmd: dict[str, subprocess.Popen[bytes]] = {}
        os.chmod(folder, 0o755)

    def __enter__(self) -> Slurm:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        ports = {"port": port, "first": port + 1, "last": port + 3}
        text = CONFIG.format(folder=self.folder, host=socket.gethostname(), **ports)
        (self.folder / "slurm.conf").write_text(text)
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        (self.folder / "state").mkdir()
        try:
            self._munge()
            self._daemon("slurmctld", "-D", "-c")
            for node in ("n1", "n2", "n3"):
                self.slurmd[node] = self._daemon("slurmd", "-D", "-N", node)
            self.wait(lambda: self.run("sinfo", "-h", "-p", "main", "-o", "%T %D") == "idle 3", 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _munge(self) -> None:
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in (munge, key):
            shutil.chown(path, "munge", "munge")
        options = [
            "--foreground",
            f"--socket={munge}/socket",
            f"--key-file={key}",
            f"--pid-file={munge}/pid",
        ]
        options += [f"--log-file={munge}/log", f"--seed-file={munge}/seed", "--force"]
        self._daemon(
            "setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", *options
        )
        self.wait(lambda: (munge / "socket").exists(), 20)

    def _daemon(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{words[0]}.out").open("ab") as out:
            self.daemons.append(subprocess.Popen(words, stdout=out, stderr=out))
        return self.daemons[-1]

    def __exit__(self, *_: object) -> None:
        subprocess.run(
            ["scancel", "--user=root", "--full", "--signal=KILL"], capture_output=True, check=False
        )
        subprocess.run(["scancel", "--user=root"], capture_output=True, check=False)
        time.sleep(2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        del os.environ["SLURM_CONF"]

    def kill(self, node: str) -> None:
        """The node is gone: its slurmd, and what it has started for jobs."""
        daemon = psutil.Process(self.slurmd[node].pid)
        for process in psutil.process_iter(["cmdline", "environ"]):
            if (process.info["environ"] or {}).get("SLURMD_NODENAME") == node:
                process.kill()
        for process in [*daemon.children(recursive=True), daemon]:
            process.kill()
        self.slurmd[node].wait()

    def revive(self, node: str) -> None:
        self.slurmd[node] = self._daemon("slurmd", "-D", "-N", node)
        self.wait(lambda: self.run("sinfo", "-h", "-p", "main", "-o", "%T %D") == "idle 3", 60)

    def run(self, *words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr.strip()

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "-o", "%T")

    def wait(self, until: Callable[[], bool], timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, self.run("squeue", "--states=all")
            time.sleep(0.2)
