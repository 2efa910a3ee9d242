"""What only Linux has is not needed: a training in a process that says it is macOS and has none of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import PROJECT
from tests.support.line import PACKAGE
from tests.support.runs import OF_ANOTHER_RUN

# The libraries are imported first: they decide by the true platform.
AS_ON_A_MAC = f"""
import builtins, ctypes, io, os, sys
import datasets, lightning.pytorch, psutil, torch.distributed.fsdp, transformers
from runpy import run_module

for name in "sched_getaffinity sched_setaffinity pidfd_open posix_fadvise posix_fallocate memfd_create".split():
    delattr(os, name)

def open_without_proc(path, *args, real=io.open, **options):
    is_psutils = "psutil" in sys._getframe(1).f_code.co_filename  # it is built for one system
    if str(path).startswith(("/proc/", "/sys/", "/dev/shm")) and not is_psutils:
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return real(path, *args, **options)

class LibraryWithoutPrctl(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)

io.open = builtins.open = open_without_proc
ctypes.CDLL = LibraryWithoutPrctl
sys.platform = "darwin"
run_module("{PACKAGE}", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_training_needs_nothing_that_only_linux_has(flags: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in OF_ANOTHER_RUN}
    short = ["--trainer.max_steps=2", "--model.optim.warmup=0", "--run.report=true"]
    command = [sys.executable, "-c", AS_ON_A_MAC, "fit", *flags, *short]
    done = subprocess.run(
        command, env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
