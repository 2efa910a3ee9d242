"""What fake GPUs report, by phase of training, and by the line that caused it and its owner.

The device calls `Events.record` in the thread of an event. It reads the stack from the innermost
frame outwards for the line, its owner and the phase, and counts. observer.py sets the phases that
the stack does not show, and writes the counts down at the end."""

from __future__ import annotations

import inspect
import re
import threading
from collections import Counter
from types import FrameType
from typing import NamedTuple

from ....project import is_users
from ...values import short

OURS = re.compile("/dist_template/|/transformers/distributed/")  # the lines of strategies
SKIPPED = re.compile("/wings/rehearse/gpu/|/fake_cuda/")
PHASES = (  # of the innermost such frame on the stack: its function, its file's end, the phase
    ("on_validation_end", "callbacks/samples.py", "sample"),
    ("save", "checkpoint/commit.py", "checkpoint"),
    ("on_train_batch_end", "callbacks/checkpoint.py", "checkpoint"),
    ("batch_to_device", ".py", "batch"),
    ("run", "loops/evaluation_loop.py", "validation"),
)


class Event(NamedTuple):
    """A kind of event, and how often it came."""

    phase: str  # start, warm-up, plain, log, end, background save, or one of PHASES
    kind: str  # one of fake_cuda.Kind
    operation: str
    owner: str  # "user" or "library", of the innermost line of either; "" without one
    place: str  # that line: file:line function
    inner: str  # the innermost line outside of torch
    count: int


def line_of(frame: FrameType) -> str:
    """Returns file:line function of a frame."""
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


def phase_of(function: str, file: str) -> str:
    """Returns the phase that a frame of the stack stands for, by PHASES; "" for other frames."""
    for name, end, phase in PHASES:
        if function == name and file.endswith(end):
            return phase
    return ""


class Events:
    """The events of this process."""

    def __init__(self) -> None:
        self.phase = "start"  # other phases are read from the stack
        self.found = Counter[tuple[str, ...]]()

    def record(self, kind: str, operation: str, detail: str) -> str:
        """Called by the device in the thread of an event; returns its place. `detail` of RACE_H2D:
        the copy's place."""
        owner = place = inner = phase = ""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:  # from the innermost line outwards; the first of each kind counts
            here, frame = frame, frame.f_back
            file = here.f_code.co_filename
            if file.endswith("rehearse/recorder.py"):  # the rehearsal's own reads
                return ""
            if SKIPPED.search(file):
                continue
            if not inner and "/torch/" not in file:
                inner = line_of(here)
            if not owner and is_users(file):
                owner, place = "user", line_of(here)
            elif not owner and OURS.search(file):
                owner, place = "library", line_of(here)
            if not phase:
                phase = phase_of(here.f_code.co_name, file)
        if threading.current_thread().name.startswith("checkpoint"):
            phase = "background save"
        elif not phase:
            phase = self.phase
        where = place
        if kind == "RACE_H2D" and detail:
            where = detail  # a race shows when the host waits, later: it counts where the copy is
        self.found[phase, kind, operation, owner, where, inner] += 1
        return place


EVENTS = Events()
