"""Exits a process: destroys its process groups, and skips the interpreter's finalization.

A worker thread of gloo (torch 2.13) can release a collective's tensors during the interpreter's
finalization, which ends every thread that requests the GIL; C++ then aborts the process with exit
code 134, after a finished run (pytorch issue 190489).

`destroy_process_group` alone does not prevent it: it joins these threads only when nothing refers
to the group any more, and under FSDP2 DTensor's caches do."""

import atexit
import os
import select
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from ..errors import Exit, reason
from .launch import record_exit

LIMIT_S = 60.0  # for destroying NCCL's communicators: another rank may be lost
_codes: list[int] = []  # the exit code, once it is decided


def skip_finalization() -> None:
    """Registers the last exit function: call it first, because they run in reverse order."""
    atexit.register(_exit)


def exit_process(code: int) -> NoReturn:
    """Exits with `code`, after all non-daemon threads and all exit functions."""
    if code == Exit.DONE and "torch.distributed" in sys.modules:
        # after a failure, it would wait for other ranks' collectives
        import torch.distributed as dist

        timer = threading.Timer(LIMIT_S, os._exit, (Exit.DONE,))
        timer.daemon = True
        timer.start()
        try:
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()
        except RuntimeError as error:  # the run is finished and saved: a restart would not help
            why = reason(error)
            print(f"note: the process groups could not be destroyed: {why}", file=sys.stderr)
        timer.cancel()
    _codes.append(code)
    record_exit(code)
    sys.exit(code)


def _exit() -> None:
    if _codes:
        code = _codes[0]
        if code == Exit.DONE and is_output_closed():
            code = Exit.CLOSED_PIPE
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # no reader, or it is closed
                stream.flush()
        os._exit(code)


def is_output_closed() -> bool:
    """Returns whether the process that reads this one's output through a pipe has exited, after a
    write of what is still buffered."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    except (AttributeError, OSError, ValueError):  # a full disk; closed by the program itself
        return False
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # errors are reported without being asked for
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # no file, as in a notebook
        return False
