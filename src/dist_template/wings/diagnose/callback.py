"""Runs the rules of diagnosis/ during training, and reports new findings."""

import json
import shlex
import time
from collections import Counter
from pathlib import Path

import lightning as L

from ...callbacks.console import console_of, only_shows
from ...errors import Ended, InputError
from ...model.any_module import metrics_of, results_of
from ...project import program
from ...ranges import Folder, NonNegativeFloat
from ...run_callback import RunCallback, loggers_of
from ..history import History, read_run
from .engine import diagnose
from .finding import Finding

FILE = "findings.jsonl"
MAX_ENTRIES = 2000  # of a metric: the rules take 20 ms for as many


class Diagnosis(RunCallback):
    """Diagnoses the run on rank 0: prints new warnings and errors, writes all to `findings.jsonl`.

    It runs at log steps, after validations, at the end and when training fails.

    Args:
        every_s: Seconds between two diagnoses at log steps. 0: at each log step.
        enabled: false: off; the verb `diagnose` works afterwards.
        folder: The run's folder."""

    def __init__(
        self, every_s: NonNegativeFloat = 30.0, enabled: bool = True, folder: Folder = "{run}"
    ) -> None:
        self.every_s = every_s
        self.enabled = enabled
        self.folder = Path(folder)
        self._history: History | None = None
        self._reported: set[tuple[str, str, str]] = set()  # rule, level and ranks of each finding
        self._open: list[Finding] = []
        self._last = 0.0  # time of the last diagnosis

    @only_shows
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reads what earlier attempts of the run wrote."""
        if trainer.is_global_zero and self.enabled:
            self._history = read_run(self.folder, limit=MAX_ENTRIES)
            self._last = time.monotonic()

    def on_log_step(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]
    ) -> None:
        self._add(trainer, metrics)
        if time.monotonic() - self._last >= self.every_s:
            self._diagnose(trainer)
        if self._history:
            counts = Counter(finding.level for finding in self._open)
            for level in ("error", "warning"):
                metrics_of(module).put(f"health/{level}s", counts[level])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._history is not None and not trainer.sanity_checking:
            self._add(trainer, results_of(trainer, pl_module))
            self._diagnose(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._diagnose(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # Other exceptions are crashes, whose findings hooks.py prints.
        is_decided = isinstance(exception, InputError | Ended)
        is_signal = not isinstance(exception, Exception)
        self._diagnose(trainer, prints=is_decided or is_signal)

    def _add(self, trainer: L.Trainer, metrics: dict[str, float]) -> None:
        if self._history is not None:
            self._history.metrics.add({"step": trainer.global_step, **metrics})

    @only_shows  # nor does a full disk or an unreliable file server end training
    def _diagnose(self, trainer: L.Trainer, prints: bool = True) -> None:
        if self._history is None:
            return
        self._last = time.monotonic()
        self._history.refresh()
        self._open = diagnose(self._history)
        console = console_of(trainer)
        if console:
            console.worst = ""
            # The most severe finding is the first.
            if self._open and self._open[0].level != "info":
                console.worst = self._open[0].title
        new = []
        for finding in self._open:
            identity = (finding.rule, finding.level, str(finding.ranks))
            if identity not in self._reported:
                self._reported.add(identity)
                new.append(finding)
        lines = [f"diagnosis: {finding.line}" for finding in new if finding.level != "info"]
        if prints and lines:
            folder = shlex.quote(str(self.folder))
            text = "\n".join([*lines, f"  more: {program('diagnose')} {folder}"])
            if console:
                console.write(text)
            else:
                print(text, flush=True)
        for finding in new:
            for logger in loggers_of(trainer):
                if finding.level == "error":
                    logger.alert(finding.title, finding.evidence, "ERROR")
            line = {"time": round(time.time(), 3), "step": trainer.global_step, **finding.as_dict()}
            with (self.folder / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
