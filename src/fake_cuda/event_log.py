"""What the device reports, in order, with the line of Python that caused it."""

import inspect
import os
import re
import threading
from types import FrameType
from typing import Literal, NamedTuple

Kind = Literal[
    # the host waits for the device
    "SYNC",  # a value is read, a blocking copy, torch.cuda.synchronize, a barrier
    "EVENT_WAIT",  # Event.synchronize
    # copies and kernels, for which the host does not wait
    "H2D_PINNED",  # a copy to the device from pinned memory
    "H2D_PAGEABLE",  # from other memory: CUDA stages it, and the host copies it first
    "D2H_PINNED",  # a copy to pinned memory; it arrives when the host waits
    "KERNEL",  # an operation on the device
    "NCCL",  # a collective or a message
    # mistakes that CUDA computes wrong values with, or slowly
    "EARLY_READ",  # pinned memory was read before a copy to it had arrived
    "RACE_H2D",  # pinned memory was written while a copy from it was under way
    "NCCL_MIXED_GROUP",  # messages and collectives by one group, where NCCL orders them
    "FP32",  # a grouped product that waits where its type is not bfloat16
    # refusals: an error follows
    "MIX",  # tensors of several devices
    "BAD_GENERATOR",  # a generator of the host
    "NCCL_CPU_TENSOR",
    "NCCL_NONCONTIGUOUS",
    "NCCL_DTYPE",
]

SKIPPED = re.compile(r"/(torch|fake_cuda)/")  # files whose lines are nobody's own


class Event(NamedTuple):
    """One thing that happened."""

    kind: Kind
    operation: str  # by torch's name, as aten::nonzero; or what it does, as "D2H blocking copy"
    detail: str  # shape and type of the tensor, or what is wrong
    place: str  # file:line function, the innermost outside of torch; "" in a thread of autograd's
    thread: str


_events: list[Event] = []


def events() -> list[Event]:
    """Returns what this process's devices have reported since the start or `clear_events`."""
    return [*_events]


def clear_events() -> None:
    """Forgets what has been reported."""
    _events.clear()


def record_event(kind: Kind, operation: str, detail: str) -> str:
    """Keeps an event; the device calls this in the thread of the event, and gets its place.

    Of RACE_H2D, which shows when the host waits, `detail` is the place of the copy."""
    place = place_of(inspect.currentframe())
    if kind == "RACE_H2D" and detail:
        place, detail = detail, f"shows at {place}"
    _events.append(Event(kind, operation, detail, place, threading.current_thread().name))
    return place


def place_of(frame: FrameType | None) -> str:
    """Returns the innermost line on a stack that is neither torch's nor this package's."""
    while frame is not None:
        code = frame.f_code
        if not SKIPPED.search(code.co_filename):
            return f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return ""


def _short(file: str) -> str:
    """Returns the path below the working directory, or the full path of a file elsewhere."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
