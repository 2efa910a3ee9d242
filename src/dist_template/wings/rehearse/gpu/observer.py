"""Callback: records a training on fake devices, without a read that waits for them."""

import json
from typing import Any

from ....model.any_module import metrics_of
from ..recorder import Recorder
from .events import EVENTS

WARM_UP = 2  # steps in which buckets, traces and buffers are made


class Observer(Recorder):
    """Records metrics of log steps and validations, and `events<rank>.json`: plain, how many
    micro-batches log nothing, and events (see events.py)."""

    plain = 0

    def on_train_start(self, trainer: Any, pl_module: object) -> None:
        EVENTS.phase = "warm-up"

    def on_train_batch_start(
        self, trainer: Any, pl_module: object, batch: object, batch_idx: int
    ) -> None:
        step = trainer.global_step + 1
        is_last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0  # of the step
        if step <= WARM_UP:
            EVENTS.phase = "warm-up"
        elif is_last and step % trainer.log_every_n_steps == 0:
            EVENTS.phase = "log"
        else:
            EVENTS.phase = "plain"
            self.plain += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: object, **__: object) -> None:
        step = trainer.global_step
        if step % trainer.log_every_n_steps == 0 and step > self._recorded_step:
            self._recorded_step = step
            self._write("step", step=step, metrics=metrics_of(pl_module).latest)

    def on_train_end(self, trainer: Any, pl_module: object) -> None:
        EVENTS.phase = "end"

    def teardown(self, trainer: Any, *_: object, **__: object) -> None:
        events = [[*key, count] for key, count in EVENTS.found.items()]
        text = json.dumps({"plain": self.plain, "events": events})
        (self.folder / f"events{trainer.global_rank}.json").write_text(text, encoding="utf-8")
