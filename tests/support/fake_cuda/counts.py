"""Counts what the fake device reports, by phase of training and by our line that caused it."""

import collections
import json
import threading
import traceback
from pathlib import Path

# Kinds: SYNC and EVENT_WAIT, the host waits for the device; H2D_PAGEABLE and D2H_ASYNC, copies;
# MIX, a host tensor in a device operation; RACE_H2D, pinned memory was written while a copy still
# read it; NCCL_*, what NCCL would refuse.
ERRORS = ("RACE_H2D", "BAD_GENERATOR", "NCCL_CPU_TENSOR", "NCCL_NONCONTIGUOUS", "NCCL_DTYPE")
OURS = ("/dist_template/", "/trainer_dev/")


class Counts:
    """Counts by phase, kind, operation, line of ours, innermost line."""

    def __init__(self) -> None:
        self.phase = "start"
        self.found = collections.Counter[tuple[str, ...]]()

    def record(self, kind: str, operation: str, detail: str) -> None:
        """Called by the device for each event, in the thread that caused it."""
        stack = traceback.extract_stack()[:-1]
        frames = [frame for frame in stack if "/fake_cuda/" not in frame.filename]
        ours = [frame for frame in frames if any(part in frame.filename for part in OURS)]
        thread = threading.current_thread().name
        phase = "background save" if thread.startswith("checkpoint") else self.phase
        self.found[phase, kind, operation, _place(ours), _place(frames)] += 1

    def write(self, path: Path, events_alive: int) -> None:
        rows = [[*key, count] for key, count in self.found.items()]
        path.write_text(json.dumps([rows, events_alive]), encoding="utf-8")


def _place(frames: list[traceback.FrameSummary]) -> str:
    if not frames:
        return "-"
    file = frames[-1].filename.rpartition("site-packages/")[2].rpartition("/src/")[2]
    return f"{file}:{frames[-1].lineno} {frames[-1].name}"


COUNTS = Counts()
