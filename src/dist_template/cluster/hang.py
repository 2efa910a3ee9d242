"""Names the rank that caused a hang, from the stack of each rank's main thread."""

from __future__ import annotations

import linecache
import re
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

# (part of a file's path, function, phase): the innermost frame of the main thread that matches
# gives the phase.
PHASES = (
    ("loops/fetchers.py", "", "in its data loader"),
    ("torch/utils/data/dataloader.py", "", "in its data loader"),
    ("", "save_checkpoint", "saving a checkpoint"),
    ("", "load_checkpoint", "loading a checkpoint"),
    ("torch/autograd/graph.py", "_engine_run_backward", "backward"),
    ("", "training_step", "forward"),
    ("", "validation_step", "forward"),
    ("", "test_step", "forward"),
    ("", "predict_step", "forward"),
    ("trainer/call.py", "_call_callback_hooks", "in a callback"),
    ("/loop.py", "each", "in a callback"),
    ("", "backward", "backward"),
    ("", "optimizer_step", "optimizer"),
    ("", "batch_to_device", "moving a batch to its device"),
    ("", "init_process_group", "joining the process group"),
    ("", "configure_model", "building the model"),
    ("trainer/call.py", "_call_setup_hook", "in setup"),
    ("strategies/", "setup", "in the strategy's setup"),
    ("loops/", "advance", "between micro-batches"),
    ("/loop.py", "advance", "between micro-batches"),
    ("<frozen importlib", "", "importing"),
)
# A process waits for other ranks if one of these is in its stack, with only frames of torch and
# DeepSpeed below it. On a GPU, collectives wait there: a process waits where it next reads or
# synchronizes the device, which is in C for the methods of tensors.
WAITING = ("/torch/distributed/", "/torch/autograd/graph.py", "/deepspeed/comm/")
WAITING += ("/torch/cuda/", "/torch/accelerator/")
READS = re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\(|\b(float|bool)\(")


def locate(frame: FrameType | None) -> tuple[str, str, bool]:
    """Returns a thread's phase, file and line, and whether it waits for other ranks."""
    files, line, phase, reads = [], "?", "", False
    while frame is not None:
        code = frame.f_code
        if not files:
            line = f"{'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno}"
            reads = bool(READS.search(linecache.getline(code.co_filename, frame.f_lineno)))
        files.append(code.co_filename)
        phase = phase or _phase(code.co_filename, code.co_name)
        frame = frame.f_back
    inner = takewhile(lambda file: "/torch/" in file or "/deepspeed/" in file, files)
    waits = reads or any(part in file for file in inner for part in WAITING)
    return phase or "elsewhere", line, waits


def _phase(file: str, function: str) -> str:
    for part, name, phase in PHASES:
        if part in file and name in ("", function):
            return phase
    return ""


def find_stalled(statuses: dict[int, dict[str, Any]], silent: list[int]) -> dict[str, Any]:
    """Returns the `sentence` that names the stalled rank, the `silent` ranks, and who prints
    (`by`).

    Ranks that do not answer are stalled; else those with the least progress which do not wait for
    another rank.

    Args:
        statuses: `WatchdogThread.status` of the ranks that answer.
        silent: The ranks that do not.
    """
    at = {rank: f"{status['place']}, {status['line']}" for rank, status in statuses.items()}
    least = min(status["beats"] for status in statuses.values())
    behind = [rank for rank, status in statuses.items() if status["beats"] == least]
    behind = [rank for rank in behind if not statuses[rank]["waits"]] or behind
    waiting: list[int] = []
    if silent:
        causes = "are unresponsive: stopped processes or lost nodes"
        if len(silent) == 1:
            causes = "is unresponsive: its process is stopped or its node is lost"
        parts, waiting = [f"{ranks_text(silent)} {causes}"], list(at)
    elif len(at) == 1:
        parts = list(at.values())
    elif len(behind) == len(at):
        parts = ["no rank is behind the others"]
        parts += [f"{ranks_text([rank])}: {place}" for rank, place in at.items()]
    else:
        parts = [f"{ranks_text([rank])} is stalled: {at[rank]}" for rank in behind]
        waiting = [rank for rank in at if rank not in behind]
    for place in dict.fromkeys(statuses[rank]["place"] for rank in waiting):
        there = [rank for rank in waiting if statuses[rank]["place"] == place]
        verb = "waits" if len(there) == 1 else "wait"
        parts.append(f"{ranks_text(there)} {verb} for it in {place.removeprefix('in ')}")
    return {"sentence": "; ".join(parts), "silent": silent, "by": min(statuses)}


def ranks_text(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    return f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}"


def rank_ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
