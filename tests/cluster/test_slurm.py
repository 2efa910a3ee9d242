"""launch/slurm.sh requeues a job if that helps; two scripts replace srun and scontrol."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.runs import PACKAGE, PROJECT


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


JOBS = [
    (0, 0, False),
    (75, 99, True),  # as often as the cluster likes
    (71, 0, True),  # a rank hung
    (137, 0, True),  # killed
    (137, 10, False),  # again and again: a person should look
    (1, 0, False),
]


@pytest.mark.parametrize(("code", "earlier", "requeued"), JOBS)
def test_a_job_is_requeued(tmp_path: Path, code: int, earlier: int, requeued: bool) -> None:
    script(tmp_path / "srun", f'echo "$DIST_RUN_ID $@" > {tmp_path}/srun.called; exit {code}')
    script(tmp_path / "scontrol", f'echo "$@" > {tmp_path}/scontrol.called')
    slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(PROJECT), "SLURM_JOB_NUM_NODES": "3"}
    slurm |= {"SLURM_RESTART_COUNT": str(earlier), "SLURM_NTASKS_PER_NODE": "2"}
    others = ("SLURM_", "DIST_", "MAX_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    env |= slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python"}
    command = ["bash", str(PROJECT / "launch" / "slurm.sh"), "fit", "--config", "x.yaml"]
    assert subprocess.run(command, env=env, capture_output=True, timeout=20).returncode == code
    called = (tmp_path / "srun.called").read_text().split()
    assert called[0] == "slurm-7", "a requeued job resumes in its folder"
    flags = ["--trainer.devices=2", "--trainer.num_nodes=3"]
    assert called[-6:] == [PACKAGE, "fit", "--config", "x.yaml", *flags]
    asked = tmp_path / "scontrol.called"
    assert (asked.read_text().split() == ["requeue", "7"]) if requeued else not asked.exists()
