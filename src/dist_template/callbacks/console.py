"""Console output: one line of progress, in place on a terminal, line by line in a log file."""

import shutil
import sys
import textwrap
import time
from collections import Counter
from datetime import timedelta
from functools import wraps
from itertools import islice
from typing import Any, TextIO

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from ..cluster.messages import is_rank_zero
from ..compat.lightning import last_step
from ..errors import Ended, another_rank_is_gone, reason
from ..metric_names import parts_of
from ..model.any_module import callbacks_of, results_of
from ..ranges import NonNegativeFloat
from ..run_callback import RunCallback

__all__ = ["console_of", "only_shows"]

COLUMNS = {  # metrics without a value are omitted
    "train/loss": "loss {:.3f}",
    "train/grad_norm": "norm {:.2f}",
    "train/learning_rate": "lr {:.2e}",
    "perf/tokens_per_s": "{:,.0f} tok/s",
    "perf/samples_per_s": "{:,.0f} samples/s",  # where samples are no sequences
    "perf/mfu": "mfu {:.0%}",
    "perf/data_wait_share": "wait {:.0%}",
}
MOST_RESULTS, MOST_OF_BAR = 16, 6  # metrics of a module in a line
HEALTH = 36  # characters of a finding's title


def only_shows(hook: Any) -> Any:
    """Decorates a method whose errors must not end training: each is reported once. Errors that
    concern other ranks are raised: a lost rank, and a decision of all ranks."""
    reported: set[str] = set()

    @wraps(hook)
    def guarded(callback: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(callback, *args, **kwargs)
        except Exception as error:
            if isinstance(error, Ended) or another_rank_is_gone(error):
                raise
            what = f"{type(callback).__name__.lower()}: {type(error).__name__}: {reason(error)}"
            if what not in reported and is_rank_zero():
                print(f"note: {what}; training continues without it", flush=True)
            reported.add(what)

    return guarded


class Console(RunCallback):
    """Prints training progress and validation results on rank 0, at log steps.

    A terminal shows one line, updated in place and never wrapped; a log file gets plain lines.

    Args:
        line_every_s: Seconds between lines if the output is not a terminal. 0 prints one at every
            log step."""

    worst = ""  # title of the worst open finding; wings/diagnose/callback.py sets it

    def __init__(self, line_every_s: NonNegativeFloat = 10.0) -> None:
        self.line_every_s = line_every_s
        self._terminal = sys.stdout.isatty()
        self._started = self._printed = 0.0
        self._first_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.perf_counter()
        self._first_step = trainer.global_step

    @rank_zero_only
    @only_shows
    def on_log_step(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float]
    ) -> None:
        now, total = time.perf_counter(), total_steps(trainer, module)
        is_last = trainer.global_step == total
        is_due = self._terminal or now - self._printed >= self.line_every_s
        if not is_due and not is_last:
            return
        self._printed = now
        parts = self._parts(trainer.global_step, total, metrics, of_progress_bar(trainer, metrics))
        line = "  ".join(parts)
        if not self._terminal:
            print(line, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line[:width]}", end="\n" if is_last else "", flush=True)

    def _parts(
        self, step: int, total: float | None, metrics: dict[str, float], own: dict[str, float]
    ) -> list[str]:
        """Returns the parts of the progress line; a narrow terminal shows the first ones. `own` are
        the module's metrics."""
        parts = [f"step {step}/{total}" if total else f"step {step}"]
        for name, form in COLUMNS.items():
            is_second = name == "perf/samples_per_s" and "perf/tokens_per_s" in metrics
            if name in metrics and not is_second:
                parts.append(form.format(metrics[name]))
            if name == "train/loss":
                parts += [f"{key} {figure(value)}" for key, value in own.items()]
        if total and step > self._first_step:
            spent_s = time.perf_counter() - self._started
            left_s = (total - step) * spent_s / (step - self._first_step)
            parts.append(f"eta {timedelta(seconds=int(left_s))}")
        if "health/errors" in metrics:  # diagnosis is on
            title = self.worst if self.worst else "ok"
            parts.append(textwrap.shorten(title, HEALTH, placeholder="…"))
        return parts

    @only_shows
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        title = "validation"
        if trainer.state.fn == "fit":  # the verb `validate` has no step
            title += f" at step {trainer.global_step}"
        self._show_results(title, results_of(trainer, pl_module))

    @only_shows
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show_results("test", results_of(trainer, pl_module))

    def _show_results(self, title: str, metrics: dict[str, float]) -> None:
        self.write(f"{title}: {'  '.join(shown_metrics(metrics, MOST_RESULTS))}")

    @rank_zero_only
    def write(self, text: str, file: TextIO | None = None) -> None:
        """Prints complete lines without breaking the progress line."""
        clear = "\r\x1b[K" if self._terminal else ""
        print(clear + text, file=file, flush=True)


def total_steps(trainer: L.Trainer, module: L.LightningModule) -> int | None:
    """Returns the optimizer steps of the training; None without an end that is known, such as with
    an endless loader."""
    total = last_step(trainer, module)
    if not 0 < total < float("inf"):  # -1: the loader has no length, and there is no max_steps
        return None
    return int(total)


def of_progress_bar(trainer: L.Trainer, shown: dict[str, float]) -> dict[str, float]:
    """Returns what the module logs with prog_bar=True in training, without the loss, which is shown
    as a mean over all ranks and steps since the last line."""
    found = {}
    for name, value in trainer.progress_bar_metrics.items():
        parts = parts_of(name)
        is_of_training = parts.stage in ("", "train") and not name.endswith("_epoch")
        if is_of_training and not parts.is_loss and name not in shown:
            found[name.removesuffix("_step")] = float(value)
    return dict(islice(found.items(), MOST_OF_BAR))


def shown_metrics(metrics: dict[str, float], most: int) -> list[str]:
    """Returns "name value" of the first `most`; the name without its group where that is unique."""
    ends = Counter(name.rpartition("/")[2] for name in metrics)
    shown = []
    for name, value in islice(metrics.items(), most):
        end = name.rpartition("/")[2]
        # "val" of acc/val does not say what it is.
        says_what = end and ends[end] == 1 and not parts_of(end).stage
        if not says_what or end.startswith("dataloader_idx_"):
            end = name
        shown.append(f"{end} {figure(value)}")
    if len(metrics) > most:
        shown.append(f"and {len(metrics) - most} more")
    return shown


def console_of(trainer: L.Trainer) -> Console | None:
    for callback in callbacks_of(trainer):
        if isinstance(callback, Console):
            return callback
    return None


def figure(value: float) -> str:
    """Formats with four digits; in scientific notation for the perplexity of a diverged model."""
    if abs(value) < 1e6:
        return f"{value:.4f}"
    return f"{value:.4e}"
