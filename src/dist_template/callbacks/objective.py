"""Ends an objective's step with the optimizer's, where the objective keeps values of a step."""

from typing import Protocol, runtime_checkable

import lightning as L

from ..compat.steps import StepCallback


@runtime_checkable
class OfSteps(Protocol):
    """A child of the module that sums over the micro-batches of an optimizer step, such as
    text.objectives.ratings.Distance."""

    def finish_step(self) -> None:
        """Takes what was summed. Collective."""


class Objective(StepCallback):
    """Calls `finish_step` after each optimizer step, before anything is saved."""

    def __init__(self) -> None:
        self._parts: list[OfSteps] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._parts = [each for each in pl_module.children() if isinstance(each, OfSteps)]

    def on_step_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        for part in self._parts:
            part.finish_step()
