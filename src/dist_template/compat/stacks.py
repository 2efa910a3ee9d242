"""Names in other libraries' stacks, by which a thread's phase is known. Verified on torch 2.13,
lightning 2.6 and deepspeed 0.19; tests/compat/test_names.py.

No public interface says what a thread of a training does. Where a file or function is gone, the
phase is an outer frame's or "elsewhere"; where one of WAITING is gone, a rank that waits for others
may be called stalled. The reported file and line are right in any case."""

import linecache
import re
from pathlib import Path
from types import FrameType

# (part of a file's path, function, phase): the innermost frame of the main thread that matches
# gives the phase. "" matches all. /loop.py is ours.
PHASES = (
    ("loops/fetchers.py", "", "in its data loader"),
    ("torch/utils/data/dataloader.py", "", "in its data loader"),
    ("", "save_checkpoint", "saving a checkpoint"),
    ("", "load_checkpoint", "loading a checkpoint"),
    ("torch/autograd/graph.py", "_engine_run_backward", "backward"),
    ("", "training_step", "forward"),
    ("", "validation_step", "forward"),
    ("trainer/call.py", "_call_callback_hooks", "in a callback"),
    ("/loop.py", "each", "in a callback"),
    ("", "backward", "backward"),
    ("", "optimizer_step", "optimizer"),
    ("", "configure_model", "building the model"),
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
    if frame is None:
        return "elsewhere", "?", False
    file, number = frame.f_code.co_filename, frame.f_lineno
    waits = bool(READS.search(linecache.getline(file, number)))
    phase = ""
    is_in_library = True  # so far, from the innermost frame on
    outer: FrameType | None = frame
    while outer is not None:
        path, function = outer.f_code.co_filename, outer.f_code.co_name
        if "/torch/" not in path and "/deepspeed/" not in path:
            is_in_library = False
        if is_in_library and any(part in path for part in WAITING):
            waits = True
        if not phase:
            phase = _phase_of(path, function)
        outer = outer.f_back
    if not phase:
        phase = "elsewhere"
    place = "/".join(Path(file).parts[-3:])
    return phase, f"{place}:{number}", waits


def _phase_of(path: str, function: str) -> str:
    for part, name, phase in PHASES:
        if part in path and name in ("", function):
            return phase
    return ""
