"""Monitors that nothing logs: of EarlyStopping, ModelCheckpoint and plateaus, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L
from lightning.pytorch import Callback

from ..compat.monitors import leave_monitors, watch_monitors
from ..errors import InputError

# ModelCheckpoint has them beside the metrics.
COUNTERS = {"epoch", "step"}


class Monitors(Callback):
    """Names the monitor, where it is set, and the metrics that are logged.

    That a metric is missing is known when it is needed first: a validation's may be logged by
    `training_step` as well.

    Args:
        given: The callbacks of trainer.callbacks.
        of_schedule: Where the monitor of a plateau is set."""

    def __init__(self, given: Sequence[Callback], of_schedule: str) -> None:
        self.given, self.of_schedule = given, of_schedule

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._module = type(pl_module).__name__
            watch_monitors(trainer, self.refuse)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            leave_monitors(trainer)

    def refuse(self, callback: Callback | None, monitor: str, metrics: Iterable[Any]) -> None:
        """Raises InputError: nothing has logged the monitor of the callback, None: of a plateau."""
        logged = ", ".join(sorted(set(map(str, metrics)) - COUNTERS))
        if not logged:
            logged = "nothing"
        if callback is None:
            who, where = "ReduceLROnPlateau", self.of_schedule
        elif any(callback is each for each in self.given):
            who, where = type(callback).__name__, "its monitor in trainer.callbacks"
        else:
            who, where = type(callback).__name__, f"{self._module}.configure_callbacks"
        raise InputError(
            f"{who} monitors {monitor!r}, which is not logged; logged are {logged}: edit {where},"
            f" or call self.log({monitor!r}, …) in a step"
        )
