"""A callback that warns, for tests of what reaches the terminal."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
from lightning.pytorch import Callback


class Warns(Callback):
    """After step 3 all ranks warn of one thing, rank 1 of two more."""

    def on_before_zero_grad(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 3:
            warnings.warn("all say this", stacklevel=1)
            if trainer.global_rank == 1:
                warnings.warn(f"only rank {trainer.global_rank} says this", stacklevel=1)
                logging.getLogger("some.library").warning("a library's %s", "log")
