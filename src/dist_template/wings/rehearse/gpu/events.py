"""What the fake device reports, by phase of training, by the line that caused it, and by whose line that is."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any, NamedTuple

from ....project import is_users
from ...values import short

# Kinds: SYNC and EVENT_WAIT, the host waits; H2D_PAGEABLE and D2H_ASYNC, copies; RACE_H2D, pinned memory was written
# while a copy read it; EARLY_READ, it was read before a copy arrived; NCCL_*, what NCCL refuses.
LIBRARY, FAKE, RECORDER = f"{os.sep}dist_template{os.sep}", os.path.dirname(__file__), "rehearse/recorder.py"
PHASES = (  # of a frame on the stack, the innermost first: its function, its file's end, the phase
    ("on_validation_end", "callbacks/samples.py", "sample"),
    ("save", "checkpoint/commit.py", "checkpoint"),
    ("on_train_batch_end", "callbacks/checkpoint.py", "checkpoint"),
    ("batch_to_device", "strategies/strategy.py", "batch"),
    ("run", "loops/evaluation_loop.py", "validation"),
)


class Event(NamedTuple):
    """A kind of event, and how often it came."""

    phase: str  # start, warm-up, plain, log, batch, validation, sample, checkpoint, background save, end
    kind: str
    operation: str
    owner: str  # "user": the innermost line of the project or this library is the project's; "library", or ""
    place: str  # that line: file:line function
    inner: str  # the innermost line outside of torch
    count: int


class Events:
    """The events of this process."""

    def __init__(self) -> None:
        self.phase = "start"  # of training; the stack tells the others
        self._found = Counter[tuple[str, ...]]()

    def record(self, kind: str, operation: str, detail: str) -> None:
        """Called by the device for each event, in the thread that caused it."""
        phase = "background save" if threading.current_thread().name.startswith("checkpoint") else self.phase
        owner = place = inner = ""
        frame: FrameType | None = sys._getframe(1)
        is_found = False
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if file.endswith(RECORDER):
                return
            if not file.startswith(FAKE):
                where = f"{short(file)}:{frame.f_lineno} {name}"
                inner = inner or where * ("/torch/" not in file)
                if not owner and (LIBRARY in file or is_users(file)):
                    owner, place = "user" if is_users(file) else "library", where
                for function, end, of_frame in PHASES:
                    if not is_found and name == function and file.endswith(end):
                        phase, is_found = of_frame, True
            frame = frame.f_back
        self._found[phase, kind, operation, owner, place, inner] += 1

    def rows(self) -> list[list[Any]]:
        return [[*key, count] for key, count in self._found.items()]


EVENTS = Events()
