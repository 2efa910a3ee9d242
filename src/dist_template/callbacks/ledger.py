"""The sample ledger: which rows this training really consumed, written by those that consumed them.

`ledger/rank<N>.jsonl`, N the data-parallel rank; `audit` reads it. Lines of an attempt begin with a header:

    {"attempt": when it began, "step": resumed from, "consumed": samples before it, "ranks": N, "data": hash, "seed": …,
     "num_rows": …, "global_batch_size": …, "jumps": [[start, end], …]}
    {"step": 7, "rows": [[17, 3], [88, 4]]}     an optimizer step: the rows of each micro-batch

Rows travel with their batch on the host, so nothing is read from a device. Lines are flushed about once a second and
before each checkpoint: what a kill loses is what the next attempt does again.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, TextIO

import lightning as L
from lightning.pytorch import Callback

from .. import weights
from ..compat.lightning import accumulates
from ..errors import InputError

FLUSH_S = 1.0


class SampleLedger(Callback):
    """Write down the rows of every optimizer step.

    Args:
        enabled: Whether to; `audit` can then prove that no sample was lost or repeated. About 8 bytes a sample.
        folder: Where to.
    """

    def __init__(self, enabled: bool = False, folder: str = "{run}/ledger") -> None:
        self.enabled = enabled
        self.folder = folder
        self._file: TextIO | None = None
        self._flushed = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not self.enabled:
            return
        data: Any = trainer.datamodule  # ty: ignore[missing-attribute]
        began = trainer.strategy.broadcast(time.time())
        if not _writes(trainer, data.rank):
            return
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        path = Path(self.folder) / f"rank{data.rank}.jsonl"
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n" if self._file.tell() else "")  # a killed process may have left half a line
        self._write(
            attempt=began,
            step=trainer.global_step,
            consumed=data.consumed_samples,
            ranks=data.world_size,
            data=hashlib.sha256(json.dumps(data.corpus.manifest, sort_keys=True).encode()).hexdigest()[:16],
            seed=data.seed,
            num_rows=len(trainer.train_dataloader.dataset),  # ty: ignore[missing-union-attribute]
            global_batch_size=data.global_batch_size,
            jumps=data.jumps,
        )
        self._flush()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._file is None or accumulates(trainer):
            return
        rows = trainer.datamodule.window_rows  # ty: ignore[missing-attribute]
        if not all(rows):
            raise InputError(
                "sample_ledger.enabled is true, and batches have no `rows`: see text/rows.py; or set false"
            )
        self._write(step=trainer.global_step, rows=rows)
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._flush()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._flush()

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, **values: Any) -> None:
        assert self._file is not None
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            self._flushed = time.monotonic()


def _writes(trainer: L.Trainer, data_parallel_rank: int) -> bool:
    """Whether this process is the first of those that share its batches (under tensor parallelism)."""
    return weights.from_all_ranks(data_parallel_rank).index(data_parallel_rank) == trainer.global_rank
