"""Exit codes for Lightning's own launcher, which `python -m <package> fit` uses.

Lightning's first process checks its children every 5 s. When one has failed, it kills all processes, itself included,
without a message and without an exit code that a scheduler could act on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from lightning.fabric.strategies.launchers import subprocess_script as launcher
from lightning.pytorch.strategies.launchers import subprocess_script as trainers_launcher

from ..errors import Exit
from .signals import end_with_parent

GRACE_S = 5.0  # for the processes to exit with the code of a common decision


class Observer(launcher._ChildProcessObserver):
    """Waits for the child processes; when one fails, ends this process with a code made of all of theirs."""

    def __init__(self, main_pid: int, child_processes: list[Any]) -> None:
        super().__init__(main_pid, child_processes, sleep_period=1)

    def _terminate_all(self) -> None:
        time.sleep(GRACE_S)  # if this process exits in the meantime, this thread ends with it
        codes = [child.poll() for child in self._child_processes]
        for child in self._child_processes:
            child.kill()
        failed = ", ".join(f"rank {rank} with {code}" for rank, code in enumerate(codes, 1) if code)
        print(f"processes exited ({failed}) and rank 0 did not: terminating all", file=sys.stderr, flush=True)
        os._exit(Exit.of_all(code for code in codes if code))


def start(*args: Any, **options: Any) -> subprocess.Popen:
    """Starts a rank that the kernel kills when this process exits, until the rank asks for SIGTERM (signals.listen).

    Otherwise a rank that hangs in the interpreter's start or in an import would outlive this process.
    """
    is_main = threading.current_thread() is threading.main_thread()  # the kernel signals when the starting thread exits
    return subprocess.Popen(*args, **options, preexec_fn=end_with_parent if is_main else None)


launcher._ChildProcessObserver = Observer  # ty: ignore[invalid-assignment]
vars(trainers_launcher)["subprocess"] = SimpleNamespace(Popen=start)
