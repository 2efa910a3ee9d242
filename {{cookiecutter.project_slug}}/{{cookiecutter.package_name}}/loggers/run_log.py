"""`metrics.jsonl`, which every run has; and what a resumed run need not tell its other loggers again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from ..history.metrics import FILE, read_lines

WRITE_S = 1.0  # lines are kept back for so long at most while others follow: a file server may be behind the folder


class RunLog(Logger):
    """What diagnosis and report are made from.

    Args:
        folder: The run's folder.
    """

    name = "metrics"
    version = ""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._lines: list[str] = []
        self._written = 0.0

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        line = {"step": step, "time": round(time.time(), 3)} | {k: float(v) for k, v in metrics.items()}
        self._lines.append(json.dumps(line) + "\n")  # NaN and Infinity as Python writes and reads them
        if time.monotonic() - self._written > WRITE_S:
            self.save()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """config.yaml has them."""

    @rank_zero_only
    def save(self) -> None:
        if self._lines:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / FILE).open("a", encoding="utf-8") as file:
                file.write("".join(self._lines))
        self._lines, self._written = [], time.monotonic()

    def finalize(self, status: str) -> None:
        self.save()


class Resumable:
    """For a logger whose storage is only added to: it is told once what is the same in two attempts.

    A run that goes on from step N does the steps after it again, and the validation of step N. It comes to the same
    values, but for times, and for all where the configuration was changed.
    """

    _known: dict[tuple[int, str], float] = {}  # noqa: RUF012  (never changed, only replaced)

    def resume(self, run: Path, step: int) -> None:
        """The run in the folder `run` goes on from `step`, before anything of the new attempt is logged."""
        raise NotImplementedError

    def new(self, metrics: Mapping[str, float], step: int | None) -> dict[str, float]:
        """Of `metrics` at `step`, what is not known."""
        return {name: value for name, value in metrics.items() if self._known.get((step or 0, name)) != float(value)}


def logged(run: Path) -> dict[int, dict[str, float]]:
    """Step -> what metrics.jsonl has of it; the newest where a step was done again."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_lines(run / FILE):
        steps.setdefault(line.pop("step"), {}).update(line)
    for line in steps.values():
        del line["time"]
    return dict(sorted(steps.items()))
