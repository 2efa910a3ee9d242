"""Writes down how a rank crashed: the traceback and the memory at that moment, before anything is taken apart.

`crash/rank<N>.txt` is for people, `crash/rank<N>.json` for diagnosis/. Those of an earlier attempt are kept beside them,
numbered. diagnosis/crash.py tells of it when the process ends.
"""

from __future__ import annotations

import json
import platform
import re
import resource
import time
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch import Callback
from torch import nn

from ..cluster.verdict import stands
from ..cluster.watch import WATCH
from ..diagnosis.crash import NOTED, attempt, own_lines
from ..errors import Ended, InputError, another_rank_is_gone, first_line, is_out_of_memory
from ..history.run import CRASHES

GIB = 2**30
ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")  # CUDA's allocator and the CPU's
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, version 1


class Crash(Callback):
    """The first callback, so that nothing has changed since the error.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / CRASHES
        self._first_step = self._before = 0

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self._before = _own_bytes()  # Python and its libraries: there is no model yet

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._first_step = trainer.global_step

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, Exception) or isinstance(exception, InputError | Ended):
            return
        try:
            path = self._write(trainer, pl_module, exception)
        except Exception as error:  # a full disk, a broken device: the error itself must be told all the same
            exception.add_note(f"(not in {self.folder}: {type(error).__name__}: {first_line(error)})")
        else:
            vars(exception)[NOTED] = str(path)

    def _write(self, trainer: Any, module: nn.Module, error: Exception) -> Path:
        rank = trainer.global_rank
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        phase, line, _ = stands(frames[-1])
        kind = "out_of_memory" if is_out_of_memory(error) else "peer" if another_rank_is_gone(error) else "other"
        record = {
            "time": time.time(),
            "attempt": attempt(),
            "step": trainer.global_step,
            "first_step": self._first_step,
            "rank": rank,
            "host": platform.node(),
            "error": type(error).__name__,
            "message": str(error),
            "kind": kind,
            "memory": _memory(trainer.strategy.root_device, self._before, str(error)),
            "phase": phase,
            "place": WATCH.position(phase),
            "module": _innermost_module(frames, module),
            "where": line,
            "own_lines": own_lines(error),
        }
        text = "".join(traceback.format_exception(error))
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((f"rank{rank}.txt", text), (f"rank{rank}.json", json.dumps(record, indent=2))):
            path = self.folder / name
            if path.exists():
                path.rename(_numbered(path))
            path.write_text(content, encoding="utf-8")
        return path


def _numbered(path: Path) -> Path:
    return path.with_name(f"{path.stem}.{len(list(path.parent.glob(f'{path.stem}.*{path.suffix}')))}{path.suffix}")


def _innermost_module(frames: list[Any], root: nn.Module) -> str:
    """The module whose forward was interrupted, "" where none was: an error in backward comes from C++."""
    names = {id(module): name for name, module in root.named_modules()}
    inside = [names.get(id(frame.f_locals.get("self")), "") for frame in frames]
    return next((name for name in reversed(inside) if name), "")


# ---- memory, in GiB --------------------------------------------------------------------------------------------------


def _memory(device: torch.device, before: int, message: str) -> dict[str, float | str]:
    """What diagnosis/remedies.py begins from: total, used, asked, outside of torch, pieces that nothing fits into."""
    found = ASKED.search(message)
    asked = float(found[1]) * UNITS[found[2]] if found else 0.0
    figures = _of_gpu(device) if device.type == "cuda" else _of_host(before)
    return {"device": device.type} | {f"{k}_gib": round(v / GIB, 4) for k, v in (figures | {"asked": asked}).items()}


def _of_gpu(device: torch.device) -> dict[str, float]:
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
    outside = max(0, total - free - torch.cuda.memory_reserved(device))  # contexts, NCCL, other processes
    figures = {"total": total, "used": reserved + outside, "outside": outside, "pieces": reserved - allocated}
    return figures | {"reserved": reserved, "peak": allocated, "allocated": torch.cuda.memory_allocated(device)}


def _of_host(before: int) -> dict[str, float]:
    """Of this process; the limit is the lowest of its address space's, its control group's and the machine's."""
    process, own = psutil.Process().memory_info(), _own_bytes()
    limits = [psutil.virtual_memory().total]
    for path in map(Path, CGROUPS):
        if path.exists() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    if (limit := _address_limit()) is not None:
        limits = [limit]
    return {"total": min(limits), "used": own, "outside": min(before, own), "rss": process.rss}


def _address_limit() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _own_bytes() -> int:
    """What counts against the limit: the address space where that is limited, else what is in memory."""
    memory = psutil.Process().memory_info()
    return memory.vms if _address_limit() is not None else memory.rss
