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
        self._kept: list[dict[str, Any]] = []
        self._written = 0.0

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._kept.append({"step": step, "time": round(time.time(), 3)} | {k: float(v) for k, v in metrics.items()})
        if time.monotonic() - self._written > WRITE_S:
            self.save()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """config.yaml has them."""

    @rank_zero_only
    def save(self) -> None:
        if self._kept:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / FILE).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in self._kept)  # NaN as Python writes and reads it
        self._kept, self._written = [], time.monotonic()

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
        all_ = {name: float(value) for name, value in metrics.items()}
        if not self._known:
            return all_
        return {name: value for name, value in all_.items() if self._known.get((step or 0, name)) != value}


def logged(run: Path) -> dict[int, dict[str, float]]:
    """Step -> what metrics.jsonl has of it; the newest where a step was done again."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_lines(run / FILE):
        steps.setdefault(line.pop("step"), {}).update(line)
    for line in steps.values():
        del line["time"]
    return dict(sorted(steps.items()))
