"""Records anomalous steps for callbacks/numerics.py.

`incidents.jsonl` has a line for each anomalous step, `jumps.json` the samples that later attempts of the run skip.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import weights
from ..observe.history.run import INCIDENTS
from ..records import write_atomically
from .global_order import stream_position

JUMPS = "jumps.json"


@dataclass
class StepCheck:
    """The figures that decide whether an optimizer step is anomalous."""

    # (2 * ranks + 2,): each rank's loss and norm (-1: not computed), then limit and is anomalous
    values: Tensor
    arrived: Any = None  # a CUDA event
    step: int = 0
    rows: Any = ()  # of this rank, one list for each micro-batch
    consumed: int = 0  # samples, including this step's
    batches: Any = ()  # of this rank, one for each micro-batch

    @classmethod
    def copy(cls, values: Tensor) -> StepCheck:
        """Starts a copy to the host, without waiting for the device."""
        if values.device.type != "cuda":
            return cls(values.cpu())
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(host, event)

    def arrive(self) -> None:
        """Waits for the copy, which started a step ago, and reads it without a device sync."""
        if self.arrived is not None:
            self.arrived.synchronize()
        *figures, self.limit, is_anomalous = self.values.numpy().tolist()
        self.losses, self.norms = figures[::2], figures[1::2]
        self.norm = math.nan if any(map(math.isnan, self.norms)) else max(self.norms)
        self.is_anomalous = bool(is_anomalous)
        self.loss = sum(self.losses) / len(self.losses)
        self.is_spike = self.is_anomalous and math.isfinite(self.loss) and self.norm < math.inf

    @property
    def suspects(self) -> list[int]:
        """The ranks whose own loss is anomalous; else those whose reduced gradient is and should
        equal the others'. None if all of them are."""
        of_loss, of_norm = [], []
        for rank, (loss, norm) in enumerate(zip(self.losses, self.norms, strict=True)):
            if not math.isfinite(loss) or (self.is_spike and loss == max(self.losses)):
                of_loss.append(rank)
            if not math.isfinite(norm):
                of_norm.append(rank)
        if not of_loss and len(of_norm) < len(self.norms):
            return of_norm
        return of_loss

    def __str__(self) -> str:
        limit = f" above {self.limit:.4g}" if self.is_spike else ""
        norm = "" if self.norm < 0 else f", gradient norm {self.norm:.4g}"
        ranks = f", from rank {', '.join(map(str, self.suspects))}" if self.suspects else ""
        return f"step {self.step} was skipped: loss {self.loss:.4g}{limit}{norm}{ranks}"


def write_incident(folder: Path, check: StepCheck, decision: str, data: Any) -> dict[str, Any]:
    """Appends a line to `incidents.jsonl` on rank 0 and returns it on all ranks. Collective."""
    local = {"data_parallel_rank": getattr(data, "rank", 0), "rows": check.rows}
    ranks = weights.from_all_ranks(local)
    incident = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": check.step,
        "kind": "spike" if check.is_spike else "non_finite",
        "decision": decision,
        "loss": check.loss,
        "limit": check.limit,
        "gradient_norm": None if check.norm < 0 else check.norm,
        "suspects": check.suspects,
        "first_bad": None,
        "ranks": [{"rank": r, "loss": check.losses[r], **each} for r, each in enumerate(ranks)],
    }
    if weights.is_rank_zero():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / INCIDENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(incident) + "\n")  # with Python's NaN and Infinity
    return incident


def add_first_bad(folder: Path, incident: dict[str, Any], first_bad: dict[str, Any] | None) -> None:
    """Adds the result of `first_bad` to `incident`, the last line of `incidents.jsonl`."""
    if first_bad and weights.is_rank_zero():
        lines = (folder / INCIDENTS).read_text(encoding="utf-8").splitlines()
        lines[-1] = json.dumps(incident | {"first_bad": first_bad})
        write_atomically(folder / INCIDENTS, "\n".join(lines) + "\n")


def read_jumps(folder: Path) -> list[dict[str, int]]:
    """Returns one entry per rollback: interval of the sample stream, step, attempt's first step."""
    path = folder / JUMPS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def add_jump(folder: Path, check: StepCheck, num_steps: int, from_step: int, data: Any) -> None:
    """Makes later attempts skip the samples of `num_steps` steps, from `check` on. Collective."""
    first, size = check.consumed - data.global_batch_size, num_steps * data.global_batch_size
    start, last = stream_position(first, data.jumps), stream_position(first + size - 1, data.jumps)
    jump = {"start": start, "end": last + 1, "step": check.step, "from_step": from_step}
    if weights.is_rank_zero():
        write_atomically(folder / JUMPS, json.dumps([*read_jumps(folder), jump]))
    if dist.is_initialized():
        dist.barrier()  # the file is written before any rank exits, and with it perhaps the job
