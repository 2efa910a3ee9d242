"""How fast training is, measured on the host between log steps, without a device sync of its own."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch import Callback

from .training_log import is_log_step


class Throughput(Callback):
    """perf/tokens_per_s and perf/samples_per_s over all ranks, perf/step_s, perf/data_wait_share, train/tokens.

    The time between two log steps is exact on any device: the log step before it ended in a transfer that waited
    for the device. Validation and checkpoints are left out of it.
    """

    def __init__(self) -> None:
        self._window_s = self._wait_s = 0.0
        self._window_step = 0
        self._batch_started = self._last_end = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._window_step = trainer.global_step
        self._last_end = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch_started = time.perf_counter()
        self._wait_s += self._batch_started - self._last_end

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self._window_s += now - self._last_end
        self._last_end = now
        steps = trainer.global_step - self._window_step
        if steps == 0 or not is_log_step(trainer):
            return
        data: Any = trainer.datamodule  # ty: ignore[missing-attribute]
        samples = steps * data.global_batch_size
        figures = {
            "perf/step_s": self._window_s / steps,
            "perf/samples_per_s": samples / self._window_s,
            "perf/tokens_per_s": samples * data.seq_len / self._window_s,
            "perf/data_wait_share": self._wait_s / self._window_s,
            "train/tokens": trainer.global_step * data.global_batch_size * data.seq_len,
        }
        for name, value in figures.items():
            pl_module.metrics.put(name, value)
        self._window_s = self._wait_s = 0.0
        self._window_step = trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_end = time.perf_counter()  # validation is not training time

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict) -> None:
        self._last_end = time.perf_counter()
