"""How a command ends: its exit codes, and the user's mistakes told in one sentence."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """What a launcher or a scheduler should do next. From 64 on the numbers are those of BSD's sysexits.h."""

    DONE = 0
    FAILED = 1  # a bug, of the project or of ours: the log has a traceback. torchrun restarts it a few times
    BAD_INPUT = 2  # do not retry: nothing but an edit helps
    NON_FINITE = 65  # do not retry: training went wrong, and a replay would go wrong again
    OUT_OF_MEMORY = 69  # do not retry: not one step fitted. Later in training it may be chance: FAILED
    HUNG = 71  # restart it: a rank did not arrive
    REQUEUE = 75  # all is saved, relaunch the same command: preempted, out of time, or nothing here can help
    MISMATCH = 78  # do not retry on these machines: they differ
    INTERRUPTED = 130  # Ctrl-C

    @classmethod
    def of_all(cls, codes: Iterable[int]) -> Exit:
        """One code for a run whose processes ended with `codes`; a negative one is a signal's, as in `subprocess`.

        A decision goes before an accident, and what killed a process before what its peers saw of it: they fail with 1,
        or are aborted or terminated.
        """
        found = set(codes)
        for code in DECIDED:
            if code in found:
                return code
        if any(code == cls.HUNG or code < 0 and code not in (-signal.SIGABRT, -signal.SIGTERM) for code in found):
            return cls.REQUEUE
        if any(code > 0 for code in found):
            return cls.FAILED
        return cls.REQUEUE if found - {0} else cls.DONE


# Whoever ends so knew what it did: starting it again at once helps nothing. Those that forbid a relaunch come first.
DECIDED = (
    Exit.BAD_INPUT, Exit.MISMATCH, Exit.NON_FINITE, Exit.OUT_OF_MEMORY, Exit.INTERRUPTED, Exit.REQUEUE
)  # fmt: skip


class Ended(Exception):
    """Training ends before its last step, by a decision that all ranks made together.

    Args:
        code: Every rank's exit code.
        sentence: Why; one rank of each node prints it.
        local_rank: Which one: 1 where rank 0 is missing.
    """

    def __init__(self, code: Exit, sentence: str, local_rank: int = 0) -> None:
        super().__init__(sentence)
        self.code = code
        self.local_rank = local_rank


class InputError(ValueError):
    """The input is wrong; the message says what was given, what is allowed and which key to edit."""


def local_rank() -> int:
    """The number of this process on its node, by what launchers set; known before anything is imported."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")


def is_first_on_node() -> bool:
    """Whether this process speaks for its node; the others found the same."""
    return local_rank() == 0


def check_least(slot: str, **given: tuple[float, float]) -> None:
    """Refuse arguments, each a pair of what is given and of the least that is allowed.

    Raises:
        InputError: one is less.
    """
    for key, (value, least) in given.items():
        if not value >= least:  # nan is neither
            raise InputError(f"{slot}.{key} is {value}; give {least} or more")


def first_line(error: BaseException | str) -> str:
    """Returns the first line of another library's message, or the error's type if it has none.

    A line that ends in a colon announces the reason: the next one is added.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "" if isinstance(error, str) else type(error).__name__
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


def reason(error: BaseException) -> str:
    """The first sentence of a message whose first line may go on for a page."""
    return first_line(error).split(". ")[0].rstrip(".")


def another_rank_is_gone(error: BaseException | str) -> bool:
    """Whether it only says so, in gloo's or NCCL's words: the reason stands in that rank's output."""
    signs = ("closed by peer", "closed by remote peer", "Connection reset", "remote process exited")
    return any(sign in str(error) for sign in signs)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a file system had no space, or the user no quota, for `error` or for what it came after."""
    full = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    while error is not None:
        # `tokenizers` writes in Rust and raises a plain Exception
        if getattr(error, "errno", None) in full or any(f"(os error {number})" in str(error) for number in full):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: the device's or the host's, as torch, CUDA and its libraries, and Python say it."""
    signs = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory", "ALLOC_FAILED")
    names = {one.__name__ for one in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or (
        isinstance(error, RuntimeError | OSError) and any(sign in str(error) for sign in signs)
    )
