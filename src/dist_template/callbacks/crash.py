"""Records how a rank crashed: the traceback and the memory at that moment, before anything is torn down.

`crash/rank<N>.txt` is for users, `crash/rank<N>.json` for diagnosis/. Those of earlier attempts are kept, numbered.
diagnosis/crash.py prints the crash when the process exits.
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

from ..cluster.environment import memory_limit
from ..cluster.hang import locate
from ..cluster.watchdog import WATCHDOG
from ..errors import Ended, InputError, another_rank_is_gone, first_line, is_out_of_memory
from ..observe.diagnosis.crash import RECORD, attempt, own_lines
from ..observe.history.run import CRASHES
from ..records import GIB, write_atomically

ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")  # CUDA's allocator and the CPU's
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


class Crash(Callback):
    """Records the exception. It is the first callback, so that nothing has changed since the error.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / CRASHES
        self._first_step: int | None = None
        self._before: Any = None  # psutil's memory_info of Python and its libraries, before the model

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self._before = self._before or psutil.Process().memory_info()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._first_step = trainer.global_step

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, Exception) or isinstance(exception, InputError | Ended):
            return
        try:
            path = self._write(trainer, pl_module, exception)
            if not another_rank_is_gone(exception):  # that takes one line; the rank itself reports the cause
                vars(exception)[RECORD] = str(path)
        except Exception as error:  # a full disk, a broken device: the error must be reported nevertheless
            exception.add_note(f"(not recorded in {self.folder}: {type(error).__name__}: {first_line(error)})")

    def _write(self, trainer: Any, module: nn.Module, error: Exception) -> Path:
        rank = trainer.global_rank
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        phase, line, _ = locate(frames[-1])
        kind = "out_of_memory" if is_out_of_memory(error) else "peer" if another_rank_is_gone(error) else "other"
        record = {
            "time": time.time(),
            "attempt": attempt(),
            "step": trainer.global_step,
            "first_step": trainer.global_step if self._first_step is None else self._first_step,
            "rank": rank,
            "host": platform.node(),
            "error": type(error).__name__,
            "message": str(error),
            "kind": kind,
            "memory": _memory(trainer.strategy.root_device, self._before, str(error)),
            "phase": phase,
            "place": WATCHDOG.position(phase),
            "module": _innermost_module(frames, module),
            "where": line,
            "own_lines": own_lines(error),
        }
        text = "".join(traceback.format_exception(error))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"rank{rank}.txt", text, keep_earlier=True)
        write_atomically(path := self.folder / f"rank{rank}.json", json.dumps(record, indent=2), keep_earlier=True)
        return path


def _innermost_module(frames: list[Any], root: nn.Module) -> str:
    """Returns the module whose forward failed, or "": an error in backward comes from C++."""
    names = {id(module): name for name, module in root.named_modules()}
    inside = [names.get(id(frame.f_locals.get("self")), "") for frame in frames]
    return next((name for name in reversed(inside) if name), "")


# ---- memory, in GiB --------------------------------------------------------------------------------------------------


def _memory(device: torch.device, before: Any, message: str) -> dict[str, float | str]:
    """Returns the input of diagnosis/remedies.py: total, used, asked, outside of torch, and fragmented memory."""
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


def _of_host(before: Any) -> dict[str, float]:
    """Returns this process's address space where that is limited (ulimit -v), else its resident memory."""
    now, limit, kind = psutil.Process().memory_info(), resource.getrlimit(resource.RLIMIT_AS)[0], "vms"
    if limit == resource.RLIM_INFINITY:
        limit, kind = memory_limit(), "rss"
    used = getattr(now, kind)
    return {"total": limit, "used": used, "outside": min(getattr(before, kind, 0), used), "rss": now.rss}
