"""Where a rank stands, by the stack of its main thread, and which of the ranks did not arrive."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

# What a rank is doing, by the innermost of its main thread's frames whose file ends so or whose function is called so.
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
    ("", "batch_to_device", "taking a batch to its device"),
    ("", "init_process_group", "joining the process group"),
    ("", "configure_model", "building the model"),
    ("trainer/call.py", "_call_setup_hook", "in setup"),
    ("strategies/", "setup", "in the strategy's setup"),
    ("loops/", "advance", "between micro-batches"),
    ("/loop.py", "advance", "between micro-batches"),
    ("<frozen importlib", "", "importing"),
)
# A process waits for the others when, before any code of other libraries or ours, one of these is in its stack.
WAITING = ("/torch/distributed/", "/torch/autograd/graph.py", "/deepspeed/comm/")


def locate(frame: FrameType | None) -> tuple[str, str, bool]:
    """What the thread of `frame`, the innermost one, is doing; file and line; whether it waits for other ranks."""
    files, line, phase = [], "?", None
    while frame is not None:
        code = frame.f_code
        if not files:
            line = f"{'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno}"
        files.append(code.co_filename)
        phase = phase or _phase(code.co_filename, code.co_name)
        frame = frame.f_back
    inner = takewhile(lambda file: "/torch/" in file or "/deepspeed/" in file, files)
    return phase or "elsewhere", line, any(part in file for file in inner for part in WAITING)


def _phase(file: str, function: str) -> str | None:
    return next((words for part, name, words in PHASES if part in file and (not name or name == function)), None)


def find_stalled(words: dict[int, dict[str, Any]], silent: list[int]) -> dict[str, Any]:
    """Which rank did not arrive: one that is silent; else one with the least progress that waits for nobody."""
    least = min(word["beats"] for word in words.values())
    behind = [rank for rank, word in words.items() if word["beats"] == least]
    behind = [rank for rank in behind if not words[rank]["waits"]] or behind
    if silent:
        why = "its process is stopped or its node is gone" if len(silent) == 1 else "they are stopped or gone"
        parts, rest = [f"{_ranks(silent)} did not arrive and says nothing: {why}"], list(words)
    elif len(words) == 1:
        (word,) = words.values()
        parts, rest = [f"{word['place']}, {word['line']}"], []
    elif len(behind) == len(words):
        places = [f"{_ranks([rank])}: {word['place']}, {word['line']}" for rank, word in words.items()]
        parts = ["no rank is behind the others", *places]
        rest = []
    else:
        parts = [f"{_ranks([r])} did not arrive: {words[r]['place']}, {words[r]['line']}" for r in behind]
        rest = [rank for rank in words if rank not in behind]
    for place in dict.fromkeys(words[rank]["place"] for rank in rest):
        there = [rank for rank in rest if words[rank]["place"] == place]
        parts.append(f"{_ranks(there)} wait{'s' * (len(there) == 1)} for it in {place.removeprefix('in ')}")
    return {"sentence": "; ".join(parts), "silent": silent, "by": min(words)}


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {rank_ranges(ranks)}"


def rank_ranges(ranks: list[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
