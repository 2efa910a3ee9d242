"""Records how a rank crashed: the traceback and the memory at that moment.

`crash/rank<N>.txt` is for users, `crash/rank<N>.json` for programs. Those of earlier attempts are
kept, numbered. observe/crash.py prints the crash when the process exits."""

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

from ..cluster.memory import memory_limit
from ..cluster.watchdog import WATCHDOG
from ..compat.stacks import locate
from ..errors import Ended, InputError, another_rank_is_gone, first_line, is_out_of_memory
from ..observe.crash import RECORD, attempt, own_lines
from ..observe.history.run import RunFile
from ..records import GIB, write_atomically

REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")  # torch's allocators
MIXED = "got mixed torch.Tensor and DTensor"
OF_SHARDS = (
    "Outside of the module's steps its parameters are sharded (DTensor) under MeshStrategy. Compute"
    " with them in training_step; keep what is computed from them, such as an average, in"
    " parameters of a copy of the network with requires_grad false, which are sharded alike, not in"
    " buffers; or set trainer.strategy to ddp."
)
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


class Crash(Callback):
    """Records the exception. It is the first callback, so that nothing has changed since the
    error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / RunFile.CRASHES
        self._first_step: int | None = None
        self._before: Any = None  # psutil's memory_info before the model was built

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self._before is None:
            self._before = psutil.Process().memory_info()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._first_step = trainer.global_step

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, Exception) or isinstance(exception, InputError | Ended):
            return
        if MIXED in str(exception):
            exception.add_note(OF_SHARDS)
        try:
            path = self._write(trainer, pl_module, exception)
            if not another_rank_is_gone(exception):  # the lost rank itself reports the cause
                vars(exception)[RECORD] = str(path)
        except Exception as error:  # a full disk, a broken device
            why = f"{type(error).__name__}: {first_line(error)}"
            exception.add_note(f"(not recorded in {self.folder}: {why})")

    def _write(self, trainer: Any, module: nn.Module, error: Exception) -> Path:
        rank = trainer.global_rank
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        phase, line, _ = locate(frames[-1])
        kind = "other"
        if is_out_of_memory(error):
            kind = "out_of_memory"
        elif another_rank_is_gone(error):
            kind = "peer"
        step = trainer.global_step
        record = {
            "time": time.time(),
            "attempt": attempt(),
            "step": step,
            "first_step": step if self._first_step is None else self._first_step,
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
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{rank}.json"
        text = "".join(traceback.format_exception(error))
        write_atomically(path.with_suffix(".txt"), text, keep_earlier=True)
        write_atomically(path, json.dumps(record, indent=2), keep_earlier=True)
        return path


def _innermost_module(frames: list[Any], root: nn.Module) -> str:
    """Returns the module whose forward failed, or "": an error in backward comes from C++."""
    names = {id(module): name for name, module in root.named_modules()}
    for frame in reversed(frames):
        name = names.get(id(frame.f_locals.get("self")))
        if name:
            return name
    return ""


def _memory(device: torch.device, before: Any, message: str) -> dict[str, float | str]:
    """Returns where the memory is, in GiB; of a CPU process the limit of addresses (ulimit -v) or
    the resident part."""
    found = REQUESTED.search(message)
    sizes = {"asked": float(found[1]) * UNITS[found[2]] if found else 0.0}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.max_memory_reserved(device)
        # Outside of torch: contexts, NCCL, other processes.
        outside = max(0, total - free - torch.cuda.memory_reserved(device))
        unused = reserved - torch.cuda.max_memory_allocated(device)
        sizes |= {"total": total, "used": reserved + outside, "outside": outside, "pieces": unused}
    else:
        now, kind = psutil.Process().memory_info(), "vms"
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            limit, kind = memory_limit(), "rss"
        used = getattr(now, kind)
        sizes |= {"total": limit, "used": used, "outside": min(getattr(before, kind, 0), used)}
    memory: dict[str, float | str] = {"device": device.type}
    for name, size in sizes.items():
        memory[f"{name}_gib"] = round(size / GIB, 4)
    return memory
