"""Without the extras and Linux most trains; what needs an extra names the command for it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.extras import without_extras
from tests.support.runs import PACKAGE, refused

LIBRARY = "'dist-template["
NEED = {
    "deepspeed": ("fit --config=strategy/zero2", f"pip install --no-build-isolation {LIBRARY}"),
    "wandb": ("fit --config=logger/wandb", f"pip install {LIBRARY}"),
    "tensorboard": ("fit --trainer.logger=TensorBoard", f"pip install {LIBRARY}"),
    "datasets": ("prepare --data.source=HubDataset --data.source.name=x", f"pip install {LIBRARY}"),
}


@pytest.mark.parametrize("package", NEED)
def test_a_lack_is_explained(package: str, flags: list[str], monkeypatch: Any, capfd: Any) -> None:
    words, command = NEED[package]
    verb, *given = words.split()
    monkeypatch.setitem(sys.modules, package, None)
    said = f" needs the package {package}: {command}{package}]'"
    assert said in refused(verb, [*flags, *given], capfd)


# The libraries are imported first: they decide by the true platform.
AS_ON_A_MAC = f"""
import builtins, ctypes, io, os, sys
import lightning.pytorch, psutil, torch.distributed.fsdp, transformers
from runpy import run_module

for name in "getaffinity setaffinity".split():
    delattr(os, "sched_" + name)
for name in "pidfd_open posix_fadvise posix_fallocate memfd_create".split():
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
def test_a_training_needs_no_extra_and_nothing_only_linux_has(flags: Any, tmp_path: Path) -> None:
    """With DDP, the default loggers and the report."""
    path = os.pathsep.join([without_extras(tmp_path), os.environ["PYTHONPATH"]])
    short = ["--trainer.max_steps=2", "--trainer.strategy=ddp", "--run.report=true"]
    command = [sys.executable, "-c", AS_ON_A_MAC, "fit", *flags, *short]
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cure = "the report needs the package plotly: pip install 'dist-template[report]'"
    assert f"at_run_end of diagnose failed: {cure}" in done.stderr
