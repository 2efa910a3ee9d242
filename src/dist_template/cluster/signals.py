"""SIGTERM and SIGUSR1 ask a run to stop; they are recorded from the process's first moment on.

A process with nothing to save, because it still starts or has finished, exits at once with
Exit.REQUEUE. A process that trains continues to the next step boundary, where
callbacks/preemption.py makes all ranks decide together.

No Python handler does any work. CPython's C handler writes the signal's number into a pipe, also
while the main thread waits inside a library, for example in the rendezvous; a thread reads it. No
slow imports here."""

import ctypes
import os
import signal
import sys
import threading
import time

from ..errors import Exit, is_first_on_node
from .launch import Variable, record_exit

__all__ = ["STOP", "end_with_parent", "listen"]

STOP = (signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIBC = ctypes.CDLL(None)  # loaded here: not between fork and exec


class _StopRequest:
    """The signal that was received, and whether a callback handles it."""

    number = 0  # the first signal since there is something to save; 0: none
    is_handled = False  # by a callback that reads `number` at every step boundary


stop_request = _StopRequest()


_processes = [os.getppid(), os.getpid()]  # this process's ancestors, and itself, at its start
os.register_at_fork(after_in_child=lambda: _processes.append(os.getpid()))


def job_started() -> float:
    """Returns a Unix time, which restarts by a launcher do not change."""
    return float(os.environ.setdefault(Variable.STARTED, str(time.time())))


def listen() -> None:
    """Handles signals from here on. Call it in the main thread, before the slow imports."""
    if signal.getsignal(signal.SIGTERM) is _nothing:
        return  # already
    job_started()
    record_exit(-signal.SIGKILL)  # unless it exits by itself
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_read_signals, args=(read,), name="signals", daemon=True).start()
    for number in STOP:
        signal.signal(number, _nothing)
    os.register_at_fork(after_in_child=_reset)
    if "LOCAL_RANK" in os.environ:  # started by a launcher
        # If the launcher is killed, a relaunch must not find this process still writing: it saves
        # and exits.
        end_with_parent(signal.SIGTERM)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Lets Linux send this process a signal when the thread that started it exits."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != _processes[-2]:  # it exited before the request
            os.kill(os.getpid(), number)


def ignore() -> None:
    """Ignores signals from here on: the exit code is decided."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)


def isolate_worker(_: int) -> None:
    """A DataLoader's worker_init_fn: workers ignore signals to their rank's process group, and exit
    when it exits. They cannot ignore SIGTERM, by which the DataLoader ends them. A busy worker
    would outlive its rank."""
    os.setpgid(0, 0)
    # The kernel watches the thread that forked. The main thread lives as long as its process;
    # another may not.
    if threading.main_thread().name == "MainThread":
        import multiprocessing

        end_with_parent()
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():  # it exited before the request
            os._exit(Exit.FAILED)


def _read_signals(read: int) -> None:
    while True:
        for number in os.read(read, 64):
            if number not in STOP:
                continue
            if not stop_request.is_handled:
                if is_first_on_node():
                    sentence = "stopped with nothing to save; the same command resumes"
                    os.write(2, f"\n{signal.Signals(number).name}: {sentence}\n".encode())
                record_exit(Exit.REQUEUE)
                os._exit(Exit.REQUEUE)
            if not stop_request.number:
                stop_request.number = number


def _nothing(number: int, frame: object) -> None:
    """CPython writes into the pipe only for signals with a Python handler."""


def _reset() -> None:
    """Resets a forked child, for example a data worker, which shares the pipe."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
