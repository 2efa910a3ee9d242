"""The moments of a run that Lightning has no hooks for.

At a log step, on every rank, in this order:

    before_log_step    a callback puts what it has measured into the module's metric buffer
    add_metrics        adds to the metrics what follows from all ranks' values
    log_metrics        Lightning's own, of each logger
    on_log_step        shows the metrics, or reacts to them

A callback that derives from RunCallback is called, and so is a logger that derives from RunLogger;
`unheard` names a class that has one of the methods and is not called."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Callback

__all__ = ["RunCallback", "loggers_of"]


class RunCallback(Callback):
    """Base of a callback that needs more hooks than Lightning's. Override the ones that you need:
    here they do nothing."""

    def before_log_step(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Called first at a log step: puts this rank's measurements into `metrics_of(module)`,
        whose values are then summed over ranks."""

    def add_metrics(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]
    ) -> None:
        """Called next: adds to `metrics` what is computed from the values of all ranks, which are
        in `metrics_of(module).of_ranks`."""

    def on_log_step(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]
    ) -> None:
        """Called last, after the loggers: `metrics` are those that they have got."""

    def on_commit(self, path: Path, hashed: dict[str, list[int]]) -> None:
        """Called when the checkpoint `path` is complete. `hashed` has the size and the CRC of each
        file that this rank has hashed."""

    def manifest_entries(self) -> dict[str, Any]:
        """Returns entries for the manifest of a checkpoint, of plain types; {} for none."""
        return {}


class RunLogger:
    """Base of a logger with more methods than Lightning's. Override the ones that you need: here
    they do nothing."""

    def log_sample(self, text: str, step: int) -> None:
        """Logs what the model has generated after a validation. Called on rank 0 alone."""

    def alert(self, title: str, text: str, level: str) -> None:
        """Notifies of a finding of the diagnosis. Called on rank 0 alone."""

    def on_checkpoint(self, path: Path) -> None:
        """Called when the checkpoint `path` is complete."""

    def on_resume(self, step: int) -> None:
        """Called when a run resumes after `step`, whose later steps are logged again."""


def run_callbacks(trainer: Any) -> list[RunCallback]:
    """Returns the callbacks of a trainer that have the hooks, in the order of calls."""
    return [each for each in getattr(trainer, "callbacks", ()) if isinstance(each, RunCallback)]


def loggers_of(trainer: Any) -> list[RunLogger]:
    """Returns the loggers of a trainer that have the methods."""
    return [each for each in trainer.loggers if isinstance(each, RunLogger)]


def unheard(trainer: Any) -> Iterator[str]:
    """Yields a line for each callback and logger with a method of these that is not called, because
    its class does not derive from the one that has it."""
    for receivers, kind in ((trainer.callbacks, RunCallback), (trainer.loggers, RunLogger)):
        hooks = [name for name in vars(kind) if not name.startswith("_")]
        for receiver in receivers:
            has = [name for name in hooks if callable(getattr(type(receiver), name, None))]
            if has and not isinstance(receiver, kind):
                name = type(receiver).__name__
                yield (
                    f"note: {name}.{has[0]} is not called: derive {name} from"
                    f" dist_template.{kind.__name__} if it is meant for a run"
                )
