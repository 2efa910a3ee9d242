"""Writes down what is being run, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch import Callback

from ..run import write_record


class Record(Callback):
    """The resolved configuration and the environment, in the run's folder and as every logger's hyperparameters.

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
        if trainer.is_global_zero:
            write_record(self.folder, yaml.safe_dump(self.config, sort_keys=False), self.defaults())
        for logger in trainer.loggers:
            logger.log_hyperparams(self.config)
