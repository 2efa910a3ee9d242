"""`launch --on slurm` under a real slurmctld on this machine; three slurmd are nodes n1 to n3."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from dist_template.errors import Exit
from tests import ROOT
from tests.support.launched import LONG, STEPS, Launched, one_machine, row, site
from tests.support.runs import logged, run
from tests.support.waiting import until

LACKING = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(name)]
LACKS = pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)} (slurm-wlm, munge)")
pytestmark = [pytest.mark.slow, pytest.mark.nightly, LACKS]
ENDED = re.compile(r"the tasks ended with code (\d+); requeue: (\w+)")
FSDP2 = "--config=strategy/fsdp2"
SLOW = ["--trainer.max_steps=400", "--trainer.val_check_interval=10000"]
SLOW += ["--trainer.limit_val_batches=1"]
Flags = list[str]

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
SlurmdTimeout=10
JobRequeue=1
KillWait=20
OverTimeLimit=0
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 \
Port=[{first}-{last}] CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The daemons, with everything that they write in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, list[subprocess.Popen[bytes]]()
        self.slurmd: dict[str, subprocess.Popen[bytes]] = {}
        folder.chmod(0o755)

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as one:
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
            self.until_idle()
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
        user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        options = [f"--socket={munge}/socket", f"--key-file={key}", f"--pid-file={munge}/pid"]
        options += [f"--log-file={munge}/log", f"--seed-file={munge}/seed", "--force"]
        self._daemon(*user, "munged", "--foreground", *options)
        self.wait(lambda: (munge / "socket").exists())

    def _daemon(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{words[0]}.out").open("ab") as out:
            self.daemons.append(subprocess.Popen(words, stdout=out, stderr=out))
        return self.daemons[-1]

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root", "--full", "--signal=KILL")
        self.run("scancel", "--user=root")
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
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("SLURMD_NODENAME") == node:
                process.kill()
        for process in [*daemon.children(recursive=True), daemon]:
            process.kill()
        self.slurmd[node].wait()

    def revive(self, node: str) -> None:
        self.slurmd[node] = self._daemon("slurmd", "-D", "-N", node)
        self.until_idle()

    def until_idle(self) -> None:
        self.wait(lambda: self.run("sinfo", "-h", "-p", "main", "-o", "%T %D") == "idle 3")

    def run(self, *words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr.strip()

    def wait(self, condition: Callable[[], bool]) -> None:
        until(condition, lambda: self.run("squeue", "--states=all"), poll_s=0.2)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    # munged's user must reach its socket: pytest's folders are closed to other users
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Slurm(Path(folder)) as started:
        yield started


class Submitted(Launched):
    """A job; `name` is its run's. `end` returns the code of its tasks."""

    def __init__(self, slurm: Slurm, folder: Path, name: str, *flags: str, **keys: Any) -> None:
        self.slurm = slurm
        environment = {"MASTER_ADDR": "127.0.0.1", **keys.pop("environment", {})}
        options = {"cpus-per-task": 1, **keys.pop("options", {})}
        where = site(folder, environment=environment, **{"nodes": 2, "options": options, **keys})
        super().__init__(folder, "slurm", *flags, where, name=name)
        assert self.process.wait(100) == 0, self.out.read_text()
        self.job = json.loads((self.run / "launch" / "launch.json").read_text())["id"]

    @property
    def log(self) -> str:
        files = sorted((self.run / "launch").glob("slurm-*.log"))
        return "".join(file.read_text() for file in files)

    def shown(self, what: str) -> str:
        """A field of squeue's, as "%T": the state."""
        words = ("squeue", "--noheader", "--states=all", f"--jobs={self.job}", "-o", what)
        return self.slurm.run(*words)

    def stop(self, number: int) -> None:
        self.slurm.run("scancel", f"--signal={number}", self.job)

    def until(self, state: str) -> None:
        self.slurm.wait(lambda: self.shown("%T") == state)

    def restart_soon(self) -> None:
        """Slurm waits two minutes before it starts a requeued job again, and slurmd refuses
        credentials of the second in which it ended the job."""
        self.until("PENDING")
        self.slurm.run("scontrol", "update", f"jobid={self.job}", "StartTime=now+2")

    def end(self) -> int:
        self.slurm.wait(lambda: bool(ENDED.search(self.log)))
        (found,) = ENDED.findall(self.log)
        assert (found[1] == "yes") == (int(found[0]) in (Exit.REQUEUE, 137))
        self.slurm.wait(lambda: self.shown("%T") not in ("RUNNING", "COMPLETING"))
        after = {"0": "COMPLETED", "75": "PENDING", "137": "PENDING"}
        assert self.shown("%T") == after.get(found[0], "FAILED")
        self.slurm.run("scancel", self.job)
        return int(found[0])


@pytest.fixture
def prepared(flags: list[str]) -> list[str]:
    assert run("prepare", *flags) == 0
    return flags


def test_slurm_has_the_same_losses_and_codes(slurm: Slurm, flags: Flags, tmp_path: Path) -> None:
    """The scheduler starts what exits with 75, or was killed, again; and nothing else."""

    def start(name: str, flags: Flags, environment: dict[str, str]) -> Submitted:
        return Submitted(slurm, tmp_path, name, *flags, environment=environment)

    line = row("slurm", flags, one_machine([*flags, *STEPS], tmp_path), start)
    assert line in (ROOT / "docs" / "launch.md").read_text(encoding="utf-8"), line


def test_a_requeued_job_resumes_exactly(slurm: Slurm, prepared: Flags, tmp_path: Path) -> None:
    whole = Submitted(slurm, tmp_path, "whole", *prepared, *SLOW, FSDP2)
    whole.until("COMPLETED")
    job = Submitted(slurm, tmp_path, "cut", *prepared, *SLOW, FSDP2)
    job.reach(5)
    job.stop(signal.SIGUSR1)
    job.restart_soon()
    job.until("COMPLETED")
    assert ENDED.findall(job.log) == [("75", "yes"), ("0", "no")]
    assert logged(job.run, "train/loss") == logged(whole.run, "train/loss")


def test_stop_saves_and_ends(slurm: Any, prepared: Flags, tmp_path: Path, capsys: Any) -> None:
    comment = 'two "words" # and \\ more'
    job = Submitted(slurm, tmp_path, "stopped", *prepared, *LONG, options={"comment": comment})
    assert job.shown("%k") == comment
    job.reach(3)
    for verb, printed in (("status", "RUNNING"), ("stop", "")):
        assert run("launch", verb, str(job.run)) == 0 and printed in capsys.readouterr().out
    job.until("FAILED")
    assert list((job.run / "checkpoints").glob("step*.ckpt"))
    assert ENDED.findall(job.log) == [("75", "yes")]
    assert run("launch", "logs", str(job.run)) == 0
    assert "stopped and saved" in capsys.readouterr().out


def test_a_job_survives_a_lost_node(slurm: Slurm, prepared: Flags, tmp_path: Path) -> None:
    every = ["--last_checkpoint.every_n_steps=5", *SLOW]
    job = Submitted(slurm, tmp_path, "node", *prepared, *every)
    job.reach(20)
    slurm.kill("n2")
    job.until("COMPLETED")  # it is started again at once, on the nodes that are left
    assert max(logged(job.run, "train/loss")) == 400 and "resumes from its newest" in job.log
    assert job.shown("%N") == "n[1,3]"
    slurm.revive("n2")
