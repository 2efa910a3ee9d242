"""Runs the rules of diagnosis/ while training goes on, and says what is new."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only

from ..errors import Ended, InputError
from ..observe.diagnosis.engine import diagnose
from ..observe.diagnosis.finding import Finding
from ..observe.history.run import History, look_again, read_run
from ..observe.loggers.wandb import WandB
from ..project import program
from .console import console_of, only_shows, write_lines

FILE = "findings.jsonl"
KEPT = 2000  # entries of a metric: the rules take 20 ms over so many
SOON_S = 1.0  # between looks after validations, should these come in quick succession


class Diagnosis(Callback):
    """Look at the run's history on rank 0, print each new warning or error once, and keep all in `findings.jsonl`.

    It also looks after a validation, at the end, and when training fails. It reads nothing from the device.

    Args:
        every_s: Seconds between two looks, at log steps. 0 looks at each of them.
        enabled: false: off; `diagnose` can still be asked afterwards.
        folder: The run's folder.
    """

    def __init__(self, every_s: float = 30.0, enabled: bool = True, folder: str = "{run}") -> None:
        self.every_s = every_s
        self.enabled = enabled
        self.folder = Path(folder)
        self._history: History | None = None
        self._told: set[Any] = set()
        self._open: list[Finding] = []
        self._looked = 0.0

    @only_shows
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What the run's earlier attempts wrote counts too."""
        if trainer.is_global_zero and self.enabled:
            self._history = read_run(self.folder, limit=KEPT)
            self._looked = time.monotonic()

    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        if self._history is None:
            return
        self._add(trainer, metrics)
        if time.monotonic() - self._looked >= self.every_s:
            self._look(trainer)
        for level in ("error", "warning"):
            module.metrics.put(f"health/{level}s", sum(finding.level == level for finding in self._open))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._history is None or trainer.sanity_checking:
            return
        self._add(trainer, pl_module.eval_metrics)
        if time.monotonic() - self._looked >= min(self.every_s, SOON_S):
            self._look(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        is_crash = isinstance(exception, Exception) and not isinstance(exception, InputError | Ended)
        self._look(trainer, says=not is_crash)  # of a crash the process's last words have all of them

    def _add(self, trainer: Any, metrics: dict[str, float]) -> None:
        if self._history is not None:
            self._history.metrics.add({"step": trainer.global_step, "time": time.time(), **metrics})

    @rank_zero_only
    @only_shows
    def _look(self, trainer: Any, says: bool = True) -> None:
        if self._history is None:
            return
        self._looked = time.monotonic()
        try:
            look_again(self._history)
        except OSError as error:  # a file server that stutters must not end training: what was read before is judged
            print(f"diagnosis: {self.folder} cannot be read: {error}", flush=True)
        self._open = diagnose(self._history)
        new = [finding for finding in self._open if finding.identity not in self._told]
        self._told |= {finding.identity for finding in new}
        for finding in new:
            self._write(finding, trainer.global_step)
        for finding in (each for each in new if each.level == "error"):
            for logger in (each for each in trainer.loggers if isinstance(each, WandB)):
                logger.alert(finding.title, finding.evidence)
        if console := console_of(trainer):
            console.worst = next((finding.title for finding in self._open if finding.level != "info"), "")
        if says and (serious := [finding for finding in new if finding.level != "info"]):
            more = f"{program('diagnose')} {self.folder}"
            write_lines(trainer, "\n".join([*(f"diagnosis: {finding.line}" for finding in serious), f"  more: {more}"]))

    def _write(self, finding: Finding, step: int) -> None:
        line = {"time": round(time.time(), 3), "step": step, **finding.as_dict()}
        try:
            with (self.folder / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk must not end training here: checkpoints decide
            print(f"diagnosis: {self.folder / FILE} cannot be written: {error}", flush=True)
