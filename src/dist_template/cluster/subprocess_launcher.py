"""Lightning's own launcher, which `python -m <package> fit` uses: what the first process does when one it started ends.

Lightning looks every 5 s, and then kills all of them, itself too: no message, and no exit code that says what to do.
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

GRACE_S = 5.0  # for the processes to end by themselves: they do, when they decided together


class Observer(launcher._ChildProcessObserver):
    """Waits for the others, then ends this process with a code made of the children's."""

    def __init__(self, main_pid: int, child_processes: list[Any]) -> None:
        super().__init__(main_pid, child_processes, sleep_period=1)

    def _terminate_all(self) -> None:
        time.sleep(GRACE_S)  # a process that ends meanwhile ends this thread
        codes = [child.poll() for child in self._child_processes]
        for child in self._child_processes:
            child.kill()
        told = ", ".join(f"rank {rank} with {code}" for rank, code in enumerate(codes, 1) if code)
        print(f"processes ended ({told}) and this one did not: all end now", file=sys.stderr, flush=True)
        os._exit(Exit.of_all(code for code in codes if code))


def start(*args: Any, **options: Any) -> subprocess.Popen:
    """Starts a rank that the kernel kills when this process ends, until it asks for SIGTERM instead (signals.listen).

    A rank that is stuck in the interpreter's start or in an import would otherwise stay, whatever ended this one.
    """
    is_main = threading.current_thread() is threading.main_thread()  # the signal comes with the end of this thread
    return subprocess.Popen(*args, **options, preexec_fn=end_with_parent if is_main else None)


launcher._ChildProcessObserver = Observer  # ty: ignore[invalid-assignment]
vars(trainers_launcher)["subprocess"] = SimpleNamespace(Popen=start)
