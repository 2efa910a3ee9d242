"""`launch --on slurm` under a real slurmctld with three virtual nodes."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_template.errors import Exit
from tests import ROOT
from tests.support.launched import LONG, STEPS, Launched, codes, row, site
from tests.support.runs import logged, only_run, run, run_in_subprocess
from tests.support.slurm import LACKING, Slurm

DOCS = ROOT / "docs" / "launch.md"
pytestmark = [pytest.mark.slow, pytest.mark.nightly]
ENDED = re.compile(r"the tasks ended with code (\d+); requeue: (\w+)")
FSDP2 = "--config=strategy/fsdp2"
Flags = list[str]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if LACKING:
        pytest.skip(f"needs {', '.join(LACKING)} (slurm-wlm, munge)")
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

    @property
    def state(self) -> str:
        return self.slurm.state(self.job)

    def stop(self, number: int) -> None:
        self.slurm.run("scancel", f"--signal={number}", self.job)

    def until(self, state: str, timeout_s: float = 200) -> None:
        self.slurm.wait(lambda: self.state == state, timeout_s)

    def restart_soon(self) -> None:
        """Slurm waits two minutes before it starts a requeued job again.

        slurmd refuses credentials of the second in which it ended the job.
        """
        self.until("PENDING")
        self.slurm.run("scontrol", "update", f"jobid={self.job}", "StartTime=now+2")

    def end(self) -> int:
        self.slurm.wait(lambda: bool(ENDED.search(self.log)), 200)
        (found,) = ENDED.findall(self.log)
        assert (found[1] == "yes") == (int(found[0]) in (Exit.REQUEUE, 137))
        self.slurm.wait(lambda: self.state not in ("RUNNING", "COMPLETING"))
        after = {"0": "COMPLETED", "75": "PENDING", "137": "PENDING"}
        assert self.state == after.get(found[0], "FAILED")
        self.slurm.run("scancel", self.job)
        return int(found[0])


@pytest.fixture
def prepared(flags: list[str]) -> list[str]:
    assert run("prepare", *flags) == 0
    return flags


def test_slurm_has_the_same_losses_and_codes(slurm: Slurm, prepared: Flags, tmp_path: Path) -> None:
    """The scheduler starts what exits with 75, or was killed, again; and nothing else."""
    root = f"--run.root={tmp_path / 'plain' / 'runs'}"
    done = run_in_subprocess("fit", *prepared, root, *STEPS, "--trainer.devices=2")
    assert done.returncode == 0, done.stderr
    losses, started = logged(only_run(tmp_path / "plain"), "train/loss"), list[Submitted]()

    def start(name: str, flags: Flags, environment: dict[str, str]) -> Submitted:
        started.append(Submitted(slurm, tmp_path, name, *flags, environment=environment))
        return started[-1]

    found = codes(start, prepared, Submitted.end)  # ty: ignore[invalid-argument-type]
    own = logged(started[0].run, "train/loss")
    print(line := row("slurm", max(abs(own[step] - losses[step]) for step in losses), found))
    assert line in DOCS.read_text(encoding="utf-8"), line


SLOW = ["--trainer.max_steps=400", "--trainer.val_check_interval=10000"]
SLOW += ["--trainer.limit_val_batches=1"]


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
    assert slurm.run("squeue", "--noheader", f"--jobs={job.job}", "-o", "%k") == comment
    job.reach(3)
    for verb, printed in (("status", "RUNNING"), ("stop", "")):
        assert run("launch", verb, str(job.run)) == 0 and printed in capsys.readouterr().out
    slurm.wait(lambda: job.state == "FAILED")
    assert list((job.run / "checkpoints").glob("step*.ckpt"))
    assert ENDED.findall(job.log) == [("75", "yes")]
    assert run("launch", "logs", str(job.run)) == 0
    assert "stopped and saved" in capsys.readouterr().out


def test_a_job_survives_a_lost_node(slurm: Slurm, prepared: Flags, tmp_path: Path) -> None:
    every = ["--last_checkpoint.every_n_steps=5", *SLOW]
    job = Submitted(slurm, tmp_path, "node", *prepared, *every)
    job.reach(20)
    slurm.kill("n2")
    job.until("COMPLETED", 300)  # it is started again at once, on the nodes that are left
    assert max(logged(job.run, "train/loss")) == 400 and "resumes from its newest" in job.log
    words = ("squeue", "-h", "--states=all", f"--jobs={job.job}", "-o", "%N")
    assert slurm.run(*words) == "n[1,3]"
    slurm.revive("n2")
