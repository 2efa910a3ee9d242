"""Where metrics go: always into the run's own metrics.jsonl, and to WandB without ever keeping training waiting."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from .history.metrics import FILE

WRITE_S = 1.0  # lines are kept back for so long at most while others follow: a file server may be behind the folder


class RunLog(Logger):
    """`metrics.jsonl` in the run's folder: what diagnosis and report are made from. Every run has one.

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


class WandB(WandbLogger):
    """One WandB run per run folder: resuming the folder resumes the run.

    Args:
        project: WandB project.
        save_dir: The run's folder; its name is the WandB run's id.
        name: Display name. null takes the id.
        group: Group of runs to file this one under. null is none.
        tags: Labels. null is none.
        notes: Free text. null is none.
        offline: true keeps all on disk, for `wandb sync` later. null decides by whether there is an API key.
        init_timeout_s: Seconds to wait for the service before going offline.
    """

    def __init__(
        self,
        project: str,
        save_dir: str = "{run}",
        name: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
        offline: bool | None = None,
        init_timeout_s: float = 30.0,
    ) -> None:
        run_id = Path(save_dir).name
        offline = not _has_api_key() if offline is None else offline
        super().__init__(
            project=project, save_dir=save_dir, name=name or run_id, id=run_id, offline=offline, resume="allow",
            group=group, tags=tags, notes=notes,
        )  # fmt: skip
        self._init_timeout_s = init_timeout_s

    @property
    @rank_zero_only
    def experiment(self) -> Any:  # pyright: ignore
        if self._experiment is None:
            import wandb

            Path(self._wandb_init["dir"]).mkdir(parents=True, exist_ok=True)
            self._wandb_init["settings"] = wandb.Settings(init_timeout=self._init_timeout_s, silent=True)
            try:
                return super().experiment
            except wandb.errors.Error as error:
                rank_zero_warn(f"WandB is not to be reached ({error}): logging offline, `wandb sync` it later")
                wandb.teardown()  # or its service says that the run's id is in use
                self._wandb_init["mode"] = "offline"
        return super().experiment


def _has_api_key() -> bool:
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"] == "online"
    import wandb

    return wandb.login(prompt=False, verify=False)  # looks for a key; asks neither the person nor the service
