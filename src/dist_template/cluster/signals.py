"""SIGTERM and SIGUSR1 ask a run to stop; they are noted from the process's first moment on.

A process that has nothing to save, because it still starts or is done already, ends at once with Exit.REQUEUE. One that
trains goes on to the next step boundary, where callbacks/preemption.py lets all ranks decide together.

No handler works. CPython's own writes the signal's number into a pipe, and does so while the main thread waits inside a
library, in the rendezvous for instance; a thread reads it. Nothing heavy is imported here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from ..errors import Exit, is_first_on_node
from .messages import MESSAGES

STOP = (signal.SIGTERM, signal.SIGUSR1)
STARTED = "DIST_JOB_STARTED"  # Unix time, in seconds, at which the first process of this job started; set by launchers
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIBC = ctypes.CDLL(None)  # loaded here: not between fork and exec


class _Asked:
    """What came, and whether somebody answers."""

    number = 0  # the first signal that came while there was something to save
    is_answered = False  # by somebody who looks at `number` at every step boundary


asked = _Asked()


def job_started() -> float:
    """Unix time; restarts by a launcher do not move it."""
    return float(os.environ.setdefault(STARTED, str(time.time())))


def listen() -> None:
    """From now on, for the rest of the process; call it in the main thread, before the slow imports."""
    job_started()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_answer, args=(read,), name="signals", daemon=True).start()
    for number in STOP:
        signal.signal(number, _nothing)
    os.register_at_fork(after_in_child=_forget)
    if "LOCAL_RANK" in os.environ:  # started by a launcher
        # Should it be killed, a relaunch must not find us at work in the same folder: we save and leave.
        end_with_parent(signal.SIGTERM)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when the thread that started it exits. Linux only."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, number)


def ignore() -> None:
    """The exit code is decided: a signal changes nothing any more."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)


def spare(_: int) -> None:
    """A DataLoader's worker_init_fn: a signal to a rank's process group does not reach its workers, its end does.

    To ignore SIGTERM here would not do: it is how the DataLoader ends its workers. torch's workers notice the end of
    their rank between two requests only: one that never answers would run on.
    """
    os.setpgid(0, 0)
    # The main thread lives as long as its process. Another thread, which may have forked this one, does not.
    if threading.main_thread().name == "MainThread":
        import multiprocessing

        end_with_parent()
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():  # ended before the kernel was asked
            os._exit(Exit.FAILED)


def _answer(read: int) -> None:
    while True:
        for number in os.read(read, 64):
            if number not in STOP:
                continue
            if not asked.is_answered:
                if is_first_on_node():
                    name = signal.Signals(number).name
                    os.write(2, f"\n{name}: stopped with nothing to save; the same command goes on\n".encode())
                MESSAGES.flush()
                os._exit(Exit.REQUEUE)
            asked.number = asked.number or number


def _nothing(number: int, frame: object) -> None:
    """A Python handler must be there for CPython to write into the pipe."""


def _forget() -> None:
    """A forked child, which reads data for instance, is none that decides; and it shares our pipe."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
