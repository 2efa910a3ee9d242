"""Runs the rules of diagnosis/ during training, and reports new findings."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only

from ...callbacks.console import console_of, only_shows, write_lines
from ...errors import Ended, InputError
from ...model.any_module import metrics_of, results_of
from ...observe.history.run import History, look_again, read_run
from ...observe.loggers.wandb import WandB
from ...project import program
from .engine import diagnose
from .finding import Finding

FILE = "findings.jsonl"
MAX_ENTRIES = 2000  # of a metric: the rules take 20 ms for as many
MIN_INTERVAL_S = 1.0  # after validations that follow each other quickly


class Diagnosis(Callback):
    """Diagnoses the run on rank 0: prints new warnings and errors, writes all to `findings.jsonl`.

    It runs at log steps, after validations, at the end and when training fails.

    Args:
        every_s: Seconds between two diagnoses at log steps. 0: at each log step.
        enabled: false: off; the verb `diagnose` works afterwards.
        folder: The run's folder.
    """

    def __init__(self, every_s: float = 30.0, enabled: bool = True, folder: str = "{run}") -> None:
        self.every_s = every_s
        self.enabled = enabled
        self.folder = Path(folder)
        self._history: History | None = None
        self._reported: set[Any] = set()  # identities of findings
        self._open: list[Finding] = []
        self._last = 0.0  # time of the last diagnosis

    @only_shows
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reads what earlier attempts of the run wrote."""
        if trainer.is_global_zero and self.enabled:
            self._history = read_run(self.folder, limit=MAX_ENTRIES)
            self._last = time.monotonic()

    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        if self._history is None:
            return
        self._add(trainer, metrics)
        if time.monotonic() - self._last >= self.every_s:
            self._diagnose(trainer)
        for level in ("error", "warning"):
            num = sum(finding.level == level for finding in self._open)
            metrics_of(module).put(f"health/{level}s", num)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._history is None or trainer.sanity_checking:
            return
        self._add(trainer, results_of(trainer, pl_module))
        if time.monotonic() - self._last >= min(self.every_s, MIN_INTERVAL_S):
            self._diagnose(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._diagnose(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        is_decided = isinstance(exception, InputError | Ended)
        # diagnosis/crash.py prints all findings of a crash.
        self._diagnose(trainer, prints=is_decided or not isinstance(exception, Exception))

    def _add(self, trainer: Any, metrics: dict[str, float]) -> None:
        if self._history is not None:
            self._history.metrics.add({"step": trainer.global_step, "time": time.time(), **metrics})

    @rank_zero_only
    @only_shows
    def _diagnose(self, trainer: Any, prints: bool = True) -> None:
        if self._history is None:
            return
        self._last = time.monotonic()
        try:
            look_again(self._history)
        except OSError as error:  # an unreliable file server must not end training
            print(f"diagnosis: {self.folder} cannot be read: {error}", flush=True)
        self._open = diagnose(self._history)
        new = [finding for finding in self._open if finding.identity not in self._reported]
        serious = [finding for finding in new if finding.level != "info"]
        for finding in new:
            self._reported.add(finding.identity)
            self._write(finding, trainer.global_step)
            for logger in trainer.loggers:
                if finding.level == "error" and isinstance(logger, WandB):
                    logger.alert(finding.title, finding.evidence, "ERROR")
        if console := console_of(trainer):
            titles = [finding.title for finding in self._open if finding.level != "info"]
            console.worst = titles[0] if titles else ""
        if prints and serious:
            lines = [f"diagnosis: {finding.line}" for finding in serious]
            lines.append(f"  more: {program('diagnose')} {self.folder}")
            write_lines(trainer, "\n".join(lines))

    def _write(self, finding: Finding, step: int) -> None:
        line = {"time": round(time.time(), 3), "step": step, **finding.as_dict()}
        try:
            with (self.folder / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # on a full disk the checkpoint callback decides
            print(f"diagnosis: {self.folder / FILE} cannot be written: {error}", flush=True)
