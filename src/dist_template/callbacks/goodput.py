"""Measures goodput: how a run's time was spent, across restarts, in `goodput.jsonl`.

observe/history/goodput.py has the kinds, which add up to the wall time; docs/recovery/index.md
explains them. A line holds an attempt's seconds so far; the last line counts. Rank 0 writes at most
one line a second, and fewer as the attempt gets older (every thousandth of its age), so that the
file stays small."""

import json
import os
import time
from pathlib import Path

import lightning as L
import psutil
from lightning.pytorch.callbacks import Checkpoint

from ..observe.history.goodput import KINDS
from ..observe.history.run import RunFile
from ..project import in_run
from ..ranges import Folder

LINE_S = 1.0

_have_trained: set[int] = set()  # ids of processes: their next training starts with its callback


class Goodput(Checkpoint):
    """Measures time on rank 0. It is a `Checkpoint`, because Lightning calls those last.

    Args:
        folder: The folder of `goodput.jsonl`."""

    def __init__(self, folder: Folder = "{run}") -> None:
        self.folder = folder
        is_second = os.getpid() in _have_trained
        self._began = time.time() if is_second else psutil.Process().create_time()
        _have_trained.add(os.getpid())
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._kind, self._since = "start", self._began
        self._between = "start"  # the kind of the time between all others
        self._written = 0.0
        self._first_step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.folder = str(in_run(self.folder, trainer))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_step = trainer.global_step
        self._write(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        self._between = "data_wait"
        self._turn_to("productive")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object, **__: object
    ) -> None:
        self._turn_to("data_wait")
        age = self._since - self._began
        if self._since - self._written > max(LINE_S, age / 1000):
            self._write(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        self._turn_to("checkpoint")
        self._write(trainer)  # the steps before it are not lost

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._turn_to("validation")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._turn_to(self._between)
        self._write(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._turn_to("data_wait")
        self._write(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._turn_to(self._kind)
        self._write(trainer)

    def _turn_to(self, kind: str) -> None:
        now = time.time()
        self._seconds[self._kind] += now - self._since
        self._kind, self._since = kind, now

    def _write(self, trainer: L.Trainer) -> None:
        verb = trainer.state.fn  # "validate" also after training, which then waits for data
        is_training = verb == "fit" or (verb == "validate" and self._between == "data_wait")
        if not trainer.is_global_zero or not is_training:
            return
        self._turn_to(self._kind)
        self._written = self._since
        line: dict[str, float] = {"attempt": self._began, "time": self._since}
        line |= {"from_step": self._first_step, "step": trainer.global_step}
        line |= {kind: round(seconds, 4) for kind, seconds in self._seconds.items() if seconds}
        path = Path(self.folder) / RunFile.GOODPUT
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
