"""What a module logs by `self.log` is written at the optimizer step that it belongs to.

Lightning 2.6.6 (`_LoggerConnector.log_metrics`) writes it under the number of steps before it, one
less than `trainer.global_step`: beside other metrics of the same step it would stand in another
line."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector


class LoggerConnector(_LoggerConnector):
    """Lightning's, with `trainer.global_step` for metrics that name no step of their own."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        names_step = step is not None or "step" in metrics
        super().log_metrics(metrics, step if names_step else self.trainer.global_step)


def log_at_optimizer_steps(trainer: Any) -> None:
    """Let `trainer` log by this file; before its first batch."""
    if type(trainer._logger_connector) is _LoggerConnector:
        trainer._logger_connector = LoggerConnector(trainer)
