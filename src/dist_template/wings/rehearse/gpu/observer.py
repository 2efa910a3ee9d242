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
    """Records the metrics of log steps, of validations, and into `events<rank>.json` what the device has reported:
    plain (number of micro-batches that log nothing), alive (events of the device that exist), events (see events.py)"""

    plain = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        EVENTS.phase = "warm-up"

    def on_train_batch_start(self, *_: object) -> None:
        """Reads no batch."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: object, **__: object) -> None:
        step, every, number = trainer.global_step, trainer.log_every_n_steps, args[-1]
        pl_module = args[0]
        if step and step % every == 0 and step != self._recorded_step:
            self._recorded_step = step
            self._write("step", step=step, metrics=metrics_of(pl_module).latest)
        ends = (number + 2) % trainer.accumulate_grad_batches == 0 and (step + 1) % every == 0
        EVENTS.phase = "warm-up" if step < WARM_UP else "log" if ends else "plain"
        self.plain += EVENTS.phase == "plain"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        EVENTS.phase = "end"

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        gc.collect()  # events that nothing refers to
        path = self.folder / f"events{trainer.global_rank}.json"
        found = {"plain": self.plain, "alive": events_alive(), "events": EVENTS.rows()}
        path.write_text(json.dumps(found), encoding="utf-8")
