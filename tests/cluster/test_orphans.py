"""Child processes of a rank that exits, and ranks that wait for one that never started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_template.errors import Exit
from tests.support.injury import children
from tests.support.runs import OF_ANOTHER_RUN, PROJECT, run

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of a parent")

WORKER_THAT_LOOPS = """
import os, sys, time
from torch.utils.data import DataLoader, Dataset
from dist_template.cluster import signals

class Looping(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.write(1, f"{os.getpid()}\\n".encode())
        while True:
            pass

batches = iter(DataLoader(Looping(), num_workers=1, worker_init_fn=signals.isolate_worker))
time.sleep(float(sys.argv[1]))
os._exit(71)  # as the watchdog does
"""

# The rank exits before its two workers ask the kernel for a signal; each holds the other's pipe to the rank.
LATE = """
import os, sys, time
from dist_template.cluster import signals

class Late:
    def prctl(self, *arguments):
        rank = os.getppid()
        os.write(1, f"{os.getpid()}\\n".encode())
        while os.getppid() == rank:
            time.sleep(0.01)
        return prctl(*arguments)

prctl, signals.LIBC = signals.LIBC.prctl, Late()
"""
LATE_WORKERS = LATE + WORKER_THAT_LOOPS.replace("num_workers=1", "num_workers=2").replace(
    "return 1", "return 2"
)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


CODES = {
    "a worker": WORKER_THAT_LOOPS,
    "workers that are late": LATE_WORKERS,
}


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("code", [*CODES.values()], ids=[*CODES])
def test_what_a_rank_has_started_ends_with_it(code: str) -> None:
    env = os.environ
    process = subprocess.Popen(
        [sys.executable, "-c", code, "3"], env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())  # no more: what was started may hold the pipe open
    try:
        assert process.wait(60) == Exit.HUNG
        deadline = time.monotonic() + 20
        while lives(pid):
            assert time.monotonic() < deadline, "it runs on"
            time.sleep(0.05)
    finally:
        if lives(pid):
            os.kill(pid, 9)


STUCK = """
import os, time
if os.environ.get("RANK") == "0":
    time.sleep(600)
"""


@LINUX
@pytest.mark.slow
def test_a_rank_zero_that_never_starts_under_torchrun_is_named_at_the_limit(
    flags: list[str], tmp_path: Path
) -> None:
    assert run("prepare", *flags) == 0
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    env = {key: value for key, value in os.environ.items() if key not in OF_ANOTHER_RUN}
    env |= {"PYTHON": sys.executable, "PYTHONPATH": f"{tmp_path}:{env['PYTHONPATH']}"}
    env |= {"NPROC": "2", "MAX_RESTARTS": "0"}
    argv = ["fit", *flags, "--trainer.strategy=ddp", "--watchdog.start_timeout_s=4"]
    command = ["bash", str(PROJECT / "launch" / "torchrun.sh"), *argv]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=env, cwd=PROJECT, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed = process.communicate(timeout=100)[0]
    finally:
        for pid in children(process.pid).values():
            os.kill(pid, 9)
        process.kill()
    assert process.returncode == Exit.REQUEUE, printed
    lines = [line for line in printed.splitlines() if line.strip()]
    assert [line for line in lines if "rank 0 of 2 did not connect within 4 s" in line], printed
    assert len(lines) <= 4 and "frame #" not in printed, printed
