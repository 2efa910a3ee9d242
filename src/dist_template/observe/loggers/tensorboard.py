"""TensorBoard with the project's charts laid out, which stays in step with a run that is resumed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from lightning.fabric.utilities.logger import _flatten_dict
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from .run_log import WRITE_S, Resumable, logged

# "Custom scalars" tab: group -> chart -> names, as regular expressions of docs/metrics.md's names
LAYOUT = {
    "train": {
        "loss": ["train/loss", "eval/loss"],
        "accuracy": ["train/token_accuracy", "eval/token_accuracy"],
        "gradient norm": ["train/grad_norm"],
        "learning rate": ["train/learning_rate"],
    },
    "eval": {"bits per byte": ["eval/bits_per_byte"], "perplexity": ["eval/perplexity", "train/perplexity"]},
    "perf": {
        "tokens per second": ["perf/tokens_per_s.*"],
        "model FLOP utilization": ["perf/mfu"],
        "seconds of a step, a validation, a checkpoint": ["perf/(step|validation|checkpoint)_s"],
        "share of time waiting for data": ["perf/data_wait_share"],
    },
    "memory": {"GiB": ["memory/.*_gib"], "peak share": ["memory/peak_share"]},
    "gpu": {
        "utilization and share throttled": ["gpu/utilization", "gpu/throttled"],
        "power (W)": ["gpu/power_w"],
        "temperature (C)": ["gpu/temperature_c"],
    },
    "rank": {"slowest rank's seconds": ["rank/slowest_step_s"], "slowest over median": ["rank/slowest_over_median"]},
    "moe": {
        "load of the fullest expert over the mean": ["moe/expert_load_max_over_mean"],
        "the same, layer by layer": ["moe/layer_.*/load_max_over_mean"],
        "load of the least used expert over the mean": ["moe/layer_.*/load_min_over_mean"],
        "entropy of the load over ln(experts)": ["moe/layer_.*/load_entropy"],
        "unused experts": ["moe/unused_experts"],
        "loss terms of the routers": ["moe/(aux|sequence|z)_loss"],
    },
    "health": {
        "findings": ["health/(errors|warnings)"],
        "share of steps clipped": ["health/clipped_share"],
        "steps left out": ["health/skipped_steps"],
        "data": ["data/.*"],
    },
}
COMPARED = ("train/loss", "eval/loss", "perf/tokens_per_s")  # beside the hyperparameters, in their tab


class TensorBoard(Resumable, TensorBoardLogger):
    """Writes an event file for each attempt into the run's folder; TensorBoard shows them as one curve.

    TensorBoard names a run by its folder: <run.name>/<id> with `--logdir runs`.

    Args:
        save_dir: The run's folder.
        flush_secs: Seconds after which values are on the disk at the latest.
    """

    def __init__(self, save_dir: str = "{run}", flush_secs: int = 10) -> None:
        super().__init__(save_dir, name="", version="", default_hp_metric=False, flush_secs=flush_secs)
        self._kept: list[tuple[float, int | None, dict[str, float]]] = []  # time, step, metrics
        self._handed_over = 0.0

    @rank_zero_only
    def resume(self, run: Path, step: int) -> None:
        """Have TensorBoard forget what earlier attempts did from `step` on, and tell it of `step` itself again."""
        from tensorboard.compat.proto import event_pb2

        messages: Any = event_pb2
        log = messages.SessionLog(status=messages.SessionLog.START)
        # As SummaryWriter does by its `purge_step`, which it wants to know before the checkpoint is read.
        self.experiment._get_file_writer().add_event(messages.Event(session_log=log), step=step)
        done = logged(run).get(step, {})
        self.log_metrics(done, step)
        self._known = {(step, name): value for name, value in done.items()}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Kept back as run_log.py keeps lines: to wake TensorBoard's thread each time took a fast loop 0.5 ms."""
        self._kept.append((time.time(), step, self.new(metrics, step)))
        if time.monotonic() - self._handed_over > WRITE_S:
            self._hand_over()

    def _hand_over(self) -> None:
        """All metrics of a step in one event: one for each, as Lightning writes them, takes seven times as long."""
        if not self._kept:
            return  # `experiment` would make a file
        from tensorboard.compat.proto import event_pb2, summary_pb2

        events, summaries = cast(Any, event_pb2), cast(Any, summary_pb2)
        writer = self.experiment._get_file_writer().event_writer
        for wall_time, step, metrics in self._kept:
            values = [summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            writer.add_event(events.Event(wall_time=wall_time, step=step, summary=summaries.Summary(value=values)))
        self._kept, self._handed_over = [], time.monotonic()

    @rank_zero_only
    def save(self) -> None:
        self._hand_over()
        super(TensorBoardLogger, self).save()  # Lightning's own writes hparams.yaml too; config.yaml has all of it

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._hand_over()
        super().finalize(status)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """As text, as a table to compare runs by, and the layout of the charts."""
        from torch.utils.tensorboard.summary import hparams

        texts = {name: params[name] for name in ("environment", "facts") if name in params}
        self.hparams = {name: value for name, value in params.items() if name not in texts}
        for name, part in {"config": self.hparams, **texts}.items():
            self.experiment.add_text(f"run/{name}", f"```\n{yaml.safe_dump(part, sort_keys=False)}\n```")
        figures = texts.get("facts", {}).get("parameters", {})
        flat = self._sanitize_params(_flatten_dict({**self.hparams, "parameters": figures}))
        for summary in hparams(flat, dict.fromkeys(COMPARED, 0.0)):
            self.experiment._get_file_writer().add_summary(summary)
        charts = {group: {name: ["Multiline", tags] for name, tags in of.items()} for group, of in LAYOUT.items()}
        self.experiment.add_custom_scalars(charts)

    @rank_zero_only
    def log_sample(self, text: str, step: int) -> None:
        self.experiment.add_text("eval/sample", f"```\n{text}\n```", step)
