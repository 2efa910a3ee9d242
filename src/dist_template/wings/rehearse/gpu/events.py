"""What fake GPUs report, by phase of training, and by the line that caused it and its owner."""

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
    # of the innermost line that is the project's or this library's: "user", "library", or ""
    # without any
    owner: str
    place: str  # that line: file:line function
    inner: str  # the innermost line outside of torch
    count: int


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
        while frame is not None:
            file, name, line = frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno
            if file.endswith("rehearse/recorder.py"):
                return ""
            if not SKIPPED.search(file):
                if not inner and "/torch/" not in file:
                    inner = f"{short(file)}:{line} {name}"
                if not owner and (OURS.search(file) or is_users(file)):
                    owner, place = (
                        "user" if is_users(file) else "library",
                        f"{short(file)}:{line} {name}",
                    )
                phase = phase or next(
                    (p for f, end, p in PHASES if name == f and file.endswith(end)), ""
                )
            frame = frame.f_back
        if threading.current_thread().name.startswith("checkpoint"):
            phase = "background save"
        where = detail if kind == "RACE_H2D" and detail else place
        self.found[phase or self.phase, kind, operation, owner, where, inner] += 1
        return place


EVENTS = Events()
