"""Exit codes, errors in the user's input, and the classification of exceptions."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
from collections.abc import Iterable
from enum import IntEnum
from importlib.metadata import requires
from importlib.util import find_spec

__all__ = [
    "Ended",
    "Exit",
    "InputError",
    "another_rank_is_gone",
    "first_line",
    "is_disk_full",
    "reason",
    "require",
    "shortened",
    "with_codes",
]


class Exit(IntEnum):
    """Exit codes, for a launcher or scheduler. Codes from 64 on follow BSD's sysexits.h."""

    DONE = 0
    FAILED = 1  # a bug; the log has a traceback. torchrun restarts it a few times
    BAD_INPUT = 2  # do not retry: the input must be edited
    NON_FINITE = 65  # do not retry: training, or a replica, diverged, and a replay would again
    OUT_OF_MEMORY = 69  # do not retry: not one step fitted in memory. Later it is FAILED
    HUNG = 71  # restart: a rank is stalled or lost
    REQUEUE = 75  # relaunch the same command: preempted, out of time, or killed; the state is saved
    MISMATCH = 78  # do not retry on these machines: their environments differ
    INTERRUPTED = 130  # Ctrl-C
    CLOSED_PIPE = 141  # the reader of the output has exited, as in `doctor | head -1`

    @classmethod
    def of_all(cls, codes: Iterable[int]) -> Exit:
        """Returns one code for a run whose processes exited with `codes`; negative codes are
        signals. Deliberate exits have priority over failures, and the first failure over those that
        follow from it: the other ranks fail with 1, or are aborted or terminated."""
        found = set(codes) - {0}
        for code in DECIDED:
            if code in found:
                return code
        killed = {code for code in found if code < 0} - {-signal.SIGABRT, -signal.SIGTERM}
        if killed or cls.HUNG in found:
            return cls.REQUEUE
        if found and max(found) > 0:
            return cls.FAILED
        return cls.REQUEUE if found else cls.DONE

    @staticmethod
    def is_deliberate(codes: Iterable[int]) -> bool:
        """Returns whether one of `codes` is deliberate: an immediate restart does not help."""
        return not set(codes).isdisjoint(DECIDED)


# Deliberate exits: an immediate restart does not help. Those that forbid a relaunch come first.
DECIDED = (
    Exit.BAD_INPUT,
    Exit.MISMATCH,
    Exit.NON_FINITE,
    Exit.OUT_OF_MEMORY,
    Exit.INTERRUPTED,
    Exit.REQUEUE,
)


class Ended(Exception):
    """Training stops before its last step, with the exit `code` on every rank; all ranks have
    agreed on it. The rank `local_rank` of each node, 1 if rank 0 is lost, prints the reason,
    `sentence`."""

    def __init__(self, code: Exit, sentence: str, local_rank: int = 0) -> None:
        super().__init__(sentence)
        self.code = code
        self.local_rank = local_rank


class InputError(ValueError):
    """The user's input is wrong: the message has the value, what is allowed and the key to edit."""


def require(package: str, purpose: str, extra: str | None = None) -> None:
    """Raises InputError, with the command that installs it, where a package of `extra` is not
    installed. None: the extra has the package's name."""
    if find_spec(package) is None:
        raise InputError(
            f"{purpose} needs the package {package}: {install_command(extra or package)}"
        )


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra, with the versions that this
    library allows. It names them and not dist-template, which no package index has."""
    packages = []
    for line in requires("dist-template") or ():
        package, _, marker = line.partition(";")
        if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker):
            packages.append(f"'{package.strip()}'")
    # DeepSpeed is built from source, and flash-attn too, against torch.
    option = " --no-build-isolation" if extra in ("deepspeed", "flash") else ""
    return f"pip install{option} {' '.join(packages or [extra])}"


def local_rank() -> int:
    """Returns the local rank from the launcher's environment variables, without imports."""
    given = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    # cluster/launch.py refuses what is no number, or no rank of the node; one process reports that
    most = os.environ.get("LOCAL_WORLD_SIZE") or "inf"
    is_rank = given.isdecimal() and (not most.isdecimal() or int(given) < int(most))
    return int(given) if is_rank else 0


def is_first_on_node() -> bool:
    """Returns whether this process reports for its node; the others have the same message."""
    return local_rank() == 0


def check_least(slot: str, **given: tuple[float, float]) -> None:
    """Raises InputError if an argument, a pair (given value, minimum), is below its minimum,
    infinite or nan."""
    for key, (value, least) in given.items():
        if not least <= value < math.inf:
            raise InputError(f"{slot}.{key} is {value}; give {least} or more")


def first_line(error: BaseException | str) -> str:
    """Returns the first line of another library's message, with the next after a colon; else the
    error's type."""
    lines = list(filter(None, map(str.strip, str(error).splitlines())))
    if not lines:
        return "" if isinstance(error, str) else type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


# C0 without tab and line feed, DEL, C1; marks that separate or reverse what is shown, or hide a
# text in another (zero width, tags; not the joiners of emoji and of Persian); halves of surrogate
# pairs, which no stream can encode
CONTROL = re.compile(
    "[\0-\x08\v-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2064"
    "\u2066-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)


def with_codes(text: str) -> str:
    """Returns a text with control characters as codes, as in \\x1b[2J."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str, most: int = 1000) -> str:
    """Returns a message without the middle of a long value, so that key and cure remain, and with
    control characters, which end lines or steer a terminal, as codes."""
    text = with_codes(text)
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def reason(error: BaseException | str) -> str:
    """Returns the first sentence of an error message; the error's type if it has none."""
    return first_line(error).split(". ")[0].rstrip(".")


def another_rank_is_gone(error: BaseException | str) -> bool:
    """Returns whether the message of gloo or NCCL only reports that another rank has exited."""
    signs = "closed by (remote )?peer|Connection reset|remote process exited"
    return re.search(signs, str(error)) is not None


def is_disk_full(error: BaseException | None) -> bool:
    """Returns whether `error`, or a cause of it, is a full file system or an exceeded quota."""
    full = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    while error is not None:
        # `tokenizers` writes in Rust and raises a plain Exception
        in_rust = re.search(r"\(os error (\d+)\)", str(error))
        number = int(in_rust[1]) if in_rust else getattr(error, "errno", None)
        if number in full:
            return True
        error = error.__cause__ or error.__context__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether device or host memory ran out, by the messages of torch, CUDA and Python."""
    signs = "out of memory|allocate memory|not enough memory|ALLOC_FAILED"
    if isinstance(error, RuntimeError | OSError) and re.search(signs, str(error)):
        return True
    return any(base.__name__ in ("MemoryError", "OutOfMemoryError") for base in type(error).__mro__)
