"""Callback: records a training on fake devices, without a read that waits for them."""

import gc
import json

import lightning as L

from ....model.any_module import metrics_of
from ..recorder import Recorder
from .cuda import events_alive
from .events import EVENTS

WARM_UP = 2  # steps in which buckets, traces and buffers are made


class Observer(Recorder):
    """Records the metrics of log steps and validations, and `events<rank>.json`: plain (micro-batches that log nothing),
    alive (events of the device that exist), events (see events.py)."""

    plain = 0

    def on_train_start(self, *_: object) -> None:
        EVENTS.phase = "warm-up"

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: object, batch: object, batch_idx: int) -> None:
        is_last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        is_log = is_last and (trainer.global_step + 1) % trainer.log_every_n_steps == 0
        EVENTS.phase = "warm-up" if trainer.global_step < WARM_UP else "log" if is_log else "plain"
        self.plain += EVENTS.phase == "plain"

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object, **__: object) -> None:
        step = trainer.global_step
        if step % trainer.log_every_n_steps == 0 and step > self._recorded_step:
            self._recorded_step = step
            self._write("step", step=step, metrics=metrics_of(pl_module).latest)

    def on_train_end(self, *_: object) -> None:
        EVENTS.phase = "end"

    def teardown(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        gc.collect()  # events that nothing refers to
        found = {"plain": self.plain, "alive": events_alive(), "events": EVENTS.rows()}
        (self.folder / f"events{trainer.global_rank}.json").write_text(json.dumps(found), encoding="utf-8")
