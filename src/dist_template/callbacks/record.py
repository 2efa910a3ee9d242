"""Writes down what is being run, before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch import Callback

from ..observe.history.run import without_folder
from ..observe.history.write import write_record
from ..observe.loggers.run_log import Resumable


class Record(Callback):
    """The resolved configuration and the environment, in the run's folder and as every logger's hyperparameters.

    The environment has the git commit and the launch command.

    Args:
        folder: The run's folder.
        config: The configuration, every key resolved, of plain types.
        defaults: Gives the YAML of the same keys as nobody has set them.
    """

    def __init__(self, folder: Path, config: dict[str, Any], defaults: Callable[[], str]) -> None:
        self.folder = folder
        self.config = config
        self.defaults = defaults

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        config = without_folder(str(self.folder), self.config)  # run again under another name, it is another run
        write_record(self.folder, yaml.safe_dump(config, sort_keys=False), self.defaults())
        known = {name: self.folder / f"{name}.json" for name in ("environment", "facts")}
        facts = {name: json.loads(path.read_text("utf-8")) for name, path in known.items() if path.exists()}
        for logger in trainer.loggers:
            logger.log_hyperparams(self.config | facts)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Where training goes on, tell the loggers that keep what was logged before."""
        for logger in trainer.loggers:
            if trainer.is_global_zero and trainer.global_step and isinstance(logger, Resumable):
                logger.resume(self.folder, trainer.global_step)
