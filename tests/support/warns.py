"""A callback that warns, for tests of what reaches the terminal."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
from lightning.pytorch import Callback

from tests.support.library import weights


class Warns(Callback):
    """After step 3 all ranks warn of one thing, rank 1 of two more; the exchanges from there to step 6 are counted."""

    gathers = 0  # since step 3: something may have warned at the start

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        real = weights.from_all_ranks

        def counted(*given: Any) -> Any:
            self.gathers += 1
            return real(*given)

        weights.from_all_ranks = counted  # ty: ignore[invalid-assignment]

    def on_before_zero_grad(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 3:
            self.gathers = 0
            warnings.warn("all say this", stacklevel=1)
            if trainer.global_rank == 1:
                warnings.warn(f"only rank {trainer.global_rank} says this", stacklevel=1)
                logging.getLogger("some.library").warning("a library's %s", "log")
        if trainer.global_step == 6:
            print(f"gathers: {self.gathers}")
