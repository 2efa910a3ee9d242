"""What a module logs by `self.log` is written at the optimizer step that it belongs to, and its
mean over ranks counts each row once.

Lightning 2.6.6 (`_LoggerConnector.log_metrics`) writes it under the number of steps before it, one
less than `trainer.global_step`: beside other metrics of the same step it would stand in another
line. It divides the sum over ranks by a mean number of rows that is rounded down, because the
number is an integer: with 16 and 15 rows, by 15."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection


class LoggerConnector(_LoggerConnector):
    """Lightning's, with `trainer.global_step` for metrics that name no step of their own."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        names_step = step is not None or "step" in metrics
        super().log_metrics(metrics, step if names_step else self.trainer.global_step)


def log_at_optimizer_steps(trainer: Any) -> None:
    """Let `trainer` log by this file; before its first batch."""
    if type(trainer._logger_connector) is _LoggerConnector:
        trainer._logger_connector = LoggerConnector(trainer)


class Results(_ResultCollection):
    """Lightning's, with numbers of rows as floats, whose mean over ranks is not rounded."""

    def _extract_batch_size(self, *args: Any, **kwargs: Any) -> Any:
        return float(super()._extract_batch_size(*args, **kwargs))


def weigh_uneven_batches(trainer: Any) -> None:
    """Lets an evaluation's mean count each row once if ranks have different numbers of rows."""
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        if type(loop._results) is _ResultCollection:
            loop._results = Results(training=False)
