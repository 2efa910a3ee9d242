"""Writes every metric to `metrics.jsonl` in the run's folder; `diagnose` and `report` read it."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from ..history.run import RunFile

WRITE_S = 1.0  # lines are buffered for at most this long: the folder may be on a file server


class RunLog(Logger):
    """Lightning logger behind `metrics.jsonl` in a run's folder; it is always on."""

    name = "metrics"
    version = ""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._buffer: list[dict[str, Any]] = []
        self._written = 0.0

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        self._buffer.append(line | {name: float(value) for name, value in metrics.items()})
        if time.monotonic() - self._written > WRITE_S:
            self.save()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: config.yaml has them."""

    @rank_zero_only
    def save(self) -> None:
        if self._buffer:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / RunFile.METRICS).open("a", encoding="utf-8") as file:
                for line in self._buffer:
                    file.write(json.dumps(line) + "\n")  # with Python's NaN and Infinity
        self._buffer, self._written = [], time.monotonic()

    def finalize(self, status: str) -> None:
        self.save()
