"""A process exits with the code that it decided on, whatever gloo's threads still do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dist_template.errors import Exit
from tests.support.runs import PACKAGE, PROJECT

# One of two processes posts an all-reduce that nobody waits for, and exits. The other joins it a second later, when the
# first one is in its interpreter's finalization, if there is one: that takes three seconds.
PROGRAM = """
import atexit, os, sys, time
from dist_template.cluster.exit import exit_process, skip_finalization
if "skip" in sys.argv:
    skip_finalization()
import torch
import torch.distributed as dist

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(3)

is_peer = os.fork() == 0
group = dist.ProcessGroupGloo(dist.FileStore(sys.argv[1], 2), int(is_peer), 2)
if is_peer:
    try:
        time.sleep(1)
        group.allreduce([torch.ones(1)]).wait()  # fails where the other process is gone
    finally:
        os._exit(0)
atexit.register(print, "exit functions run")
slow = Slow()
group.allreduce([torch.ones(1)])
exit_process(75)
"""


def exit_of(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program.replace("PACKAGE", PACKAGE), *arguments]
    return subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_collective_that_finishes_late_does_not_abort_the_process(tmp_path: Path) -> None:
    left = exit_of(PROGRAM, str(tmp_path / "store"), "skip")
    assert (left.returncode, left.stderr) == (Exit.REQUEUE, "")
    assert left.stdout == "exit functions run\n"


def test_process_groups_are_destroyed_where_the_run_is_done(tmp_path: Path) -> None:
    program = """
import atexit, sys
from dist_template.cluster.exit import exit_process, skip_finalization
skip_finalization()
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(lambda: print(dist.is_initialized()))
exit_process(int(sys.argv[1]))
"""
    assert exit_of(program, "0").stdout == "False\n"
    failed = exit_of(program, "1")
    assert (failed.returncode, failed.stdout) == (1, "True\n"), (
        "another rank may be in a collective"
    )
