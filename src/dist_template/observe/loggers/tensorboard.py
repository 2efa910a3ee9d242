"""Lightning's TensorBoardLogger, with the configuration as text, and a resumed run as one."""

import time
from collections.abc import Mapping
from typing import Any

import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from ...errors import require
from .run_log import WRITE_S


class TensorBoard(TensorBoardLogger):
    """Writes one event file per attempt into the run's folder, which TensorBoard shows as one run.

    Args:
        save_dir: The run's folder.
        flush_secs: Seconds after which values are on the disk at the latest.
    """

    def __init__(self, save_dir: str = "{run}", flush_secs: int = 10) -> None:
        require("tensorboard", "the logger TensorBoard")
        super().__init__(save_dir, "", "", default_hp_metric=False, flush_secs=flush_secs)
        self._buffer: list[Any] = []  # events, one for each log step
        self._handed_over = 0.0

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Buffers a log step's metrics as one event for `WRITE_S`, as run_log.py does: Lightning's event for each
        metric wakes the writer's thread, and a step of 0.5 ms takes 0.1 ms more."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        events: Any = event_pb2
        messages: Any = summary_pb2
        pairs = metrics.items()
        values = [messages.Summary.Value(tag=tag, simple_value=float(one)) for tag, one in pairs]
        summary = messages.Summary(value=values)
        self._buffer.append(events.Event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._handed_over > WRITE_S:
            self._hand_over()

    def _hand_over(self) -> None:
        for event in self._buffer:  # without any, `experiment` would create a file for nothing
            self.experiment.file_writer.event_writer.add_event(event)
        self._buffer, self._handed_over = [], time.monotonic()

    @rank_zero_only
    def on_resume(self, step: int) -> None:
        """Has TensorBoard drop what earlier attempts logged after the checkpoint's `step`.

        SummaryWriter's `purge_step` does the same, but must be known before the checkpoint is read.
        """
        from tensorboard.compat.proto import event_pb2

        messages: Any = event_pb2
        start = messages.SessionLog(status=messages.SessionLog.START)
        self.experiment.file_writer.add_event(messages.Event(session_log=start), step + 1)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Logs the configuration as text."""
        self._log_text("run/config", yaml.safe_dump(params, sort_keys=False))

    @rank_zero_only
    def log_sample(self, text: str, step: int) -> None:
        self._log_text("eval/sample", text, step)

    def _log_text(self, tag: str, text: str, step: int | None = None) -> None:
        self.experiment.add_text(tag, f"```\n{text}\n```", step)

    @rank_zero_only
    def save(self) -> None:
        self._hand_over()
        self.experiment.flush()  # Lightning's also writes hparams.yaml; config.yaml has the same

    def finalize(self, status: str) -> None:
        self.save()  # Lightning's closes the writer, and a validation may follow
