"""Lightning's TensorBoardLogger, with the configuration as text, and a resumed run as one."""

from collections.abc import Mapping
from typing import Any

import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from ...errors import require
from ...ranges import Folder, PositiveInt
from ...run_callback import RunLogger


class _Dumper(yaml.SafeDumper):
    """Writes values that YAML has no form for, such as a Path or a class, as their text: a module
    may have any hyperparameters."""


_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))


class TensorBoard(RunLogger, TensorBoardLogger):
    """Writes one event file per attempt into the run's folder, which TensorBoard shows as one run.

    Args:
        save_dir: The run's folder.
        flush_secs: Seconds after which values are on the disk at the latest."""

    def __init__(self, save_dir: Folder = "{run}", flush_secs: PositiveInt = 10) -> None:
        require("tensorboard", "the logger TensorBoard")
        super().__init__(save_dir, "", "", default_hp_metric=False, flush_secs=flush_secs)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes a log step's metrics as one event, in place of Lightning's event for each."""
        from tensorboard.compat.proto import summary_pb2

        messages: Any = summary_pb2
        values = [
            messages.Summary.Value(tag=tag, simple_value=float(one)) for tag, one in metrics.items()
        ]
        self.experiment.file_writer.add_summary(messages.Summary(value=values), step)

    @rank_zero_only
    def on_resume(self, step: int) -> None:
        """Has TensorBoard drop what earlier attempts logged after the checkpoint's `step`.
        SummaryWriter's `purge_step` does the same, but must be known before the checkpoint is
        read."""
        from tensorboard.compat.proto import event_pb2

        messages: Any = event_pb2
        start = messages.SessionLog(status=messages.SessionLog.START)
        self.experiment.file_writer.add_event(messages.Event(session_log=start), step + 1)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Logs the configuration as text."""
        self._log_text("run/config", yaml.dump(params, Dumper=_Dumper, sort_keys=False))

    @rank_zero_only
    def log_sample(self, text: str, step: int) -> None:
        self._log_text("eval/sample", text, step)

    def _log_text(self, tag: str, text: str, step: int | None = None) -> None:
        self.experiment.add_text(tag, f"```\n{text}\n```", step)

    @rank_zero_only
    def save(self) -> None:
        self.experiment.flush()  # Lightning's also writes hparams.yaml; config.yaml has the same

    def finalize(self, status: str) -> None:
        self.save()  # Lightning's closes the writer, and a validation may follow
