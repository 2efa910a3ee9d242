"""Child processes of a rank that exits."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_template.errors import Exit

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of a parent")

WORKERS_THAT_LOOP = """
import os, sys, time
from torch.utils.data import DataLoader, Dataset
from dist_template.cluster import signals

class Looping(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        os.write(1, f"{os.getpid()}\\n".encode())
        while True:
            pass

def load():
    workers = int(sys.argv[1])
    return iter(DataLoader(Looping(), num_workers=workers, worker_init_fn=signals.isolate_worker))
"""

# The rank exits before its two workers ask for a signal; each holds the other's pipe to the rank.
LATE = """
class Late:
    def prctl(self, *arguments):
        rank = os.getppid()
        os.write(1, f"{os.getpid()}\\n".encode())
        while os.getppid() == rank:
            time.sleep(0.01)
        return prctl(*arguments)

prctl, signals.LIBC = signals.LIBC.prctl, Late()
"""
EXITS = "batches = load(); time.sleep(2); os._exit(71)  # as the watchdog does"
CODES = {"1": WORKERS_THAT_LOOP + EXITS, "2": WORKERS_THAT_LOOP + LATE + EXITS}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("workers", CODES, ids=["a worker", "workers that are late"])
def test_what_a_rank_has_started_ends_with_it(workers: str) -> None:
    command = [sys.executable, "-c", CODES[workers], workers]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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
