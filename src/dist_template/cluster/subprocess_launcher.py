"""Exit codes for Lightning's own launcher, which `python -m <package> fit` uses.

Lightning's first process checks its children every 5 s. When one has failed, it kills all processes, itself included,
without a message and without an exit code that a scheduler could act on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

from ..compat.lightning import use_processes
from ..errors import Exit
from .signals import end_with_parent

GRACE_S = 5.0  # for the processes to exit with the code of a common decision


def terminate(children: list[subprocess.Popen]) -> None:
    """Waits for the child processes after one has failed, then exits with a code of all theirs."""
    time.sleep(GRACE_S)  # if this process exits in the meantime, this thread ends with it
    failed = []  # exit codes
    for child in children:
        if code := child.poll():
            failed.append(code)
        child.kill()
    print(f"processes exited with {failed} and rank 0 did not: terminating all", file=sys.stderr, flush=True)
    os._exit(Exit.of_all(failed))


def start(*args: Any, **options: Any) -> subprocess.Popen:
    """Starts a rank that the kernel kills when this process exits, until the rank asks for SIGTERM (signals.listen).

    Otherwise a rank that hangs in the interpreter's start or in an import would outlive this process."""
    # The kernel sends the signal when the thread that starts the rank exits.
    is_main = threading.current_thread() is threading.main_thread()
    return subprocess.Popen(*args, **options, preexec_fn=end_with_parent if is_main else None)


def install() -> None:
    """Lets Lightning's launcher in this process start and end ranks by this file."""
    use_processes(start, terminate)
