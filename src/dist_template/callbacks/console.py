"""Console output: one line of progress, in place on a terminal, line by line in a log file."""

import shutil
import sys
import textwrap
import time
from datetime import timedelta
from functools import wraps
from typing import Any, TextIO

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only

from ..cluster.messages import is_rank_zero
from ..compat.lightning import last_step
from ..errors import Ended, another_rank_is_gone, reason
from ..model.any_module import callbacks_of, results_of

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


class Console(Callback):
    """Prints training progress and validation results on rank 0, at log steps.

    A terminal shows one line, updated in place and never wrapped; a log file gets plain lines.

    Args:
        line_every_s: Seconds between lines if the output is not a terminal. 0 prints one at every
            log step."""

    worst = ""  # title of the worst open finding; wings/diagnose/callback.py sets it

    def __init__(self, line_every_s: float = 10.0) -> None:
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
        now = time.perf_counter()
        end = last_step(trainer)
        is_last = trainer.global_step == end
        if not (self._terminal or is_last or now - self._printed >= self.line_every_s):
            return
        self._printed = now
        parts = self._parts(trainer.global_step, end, metrics)
        line = "  ".join(parts)
        if not self._terminal:
            print(line, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line[:width]}", end="\n" if is_last else "", flush=True)

    def _parts(self, step: int, total: float, metrics: dict[str, float]) -> list[str]:
        """Returns the parts of the progress line; a narrow terminal shows the first ones."""
        has_end = total != float("inf")
        parts = [f"step {step}/{total}" if has_end else f"step {step}"]
        for name, form in COLUMNS.items():
            is_second = name == "perf/samples_per_s" and "perf/tokens_per_s" in metrics
            if name in metrics and not is_second:
                parts.append(form.format(metrics[name]))
        if has_end and step > self._first_step:
            seconds = (
                (total - step) * (time.perf_counter() - self._started) / (step - self._first_step)
            )
            parts.append(f"eta {timedelta(seconds=int(seconds))}")
        if "health/errors" in metrics:  # diagnosis is on
            parts.append(textwrap.shorten(self.worst or "ok", HEALTH, placeholder="…"))
        return parts

    @only_shows
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show_results(
            f"validation at step {trainer.global_step}", results_of(trainer, pl_module)
        )

    @only_shows
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show_results("test", results_of(trainer, pl_module))

    def _show_results(self, title: str, metrics: dict[str, float]) -> None:
        shown = [f"{name.split('/')[-1]} {figure(value)}" for name, value in metrics.items()]
        self.write(f"{title}: {'  '.join(shown)}")

    @rank_zero_only
    def write(self, text: str, file: TextIO | None = None) -> None:
        """Prints complete lines without breaking the progress line."""
        clear = "\r\x1b[K" if self._terminal else ""
        print(clear + text, file=file, flush=True)


def console_of(trainer: L.Trainer) -> Console | None:
    return next((each for each in callbacks_of(trainer) if isinstance(each, Console)), None)


def figure(value: float) -> str:
    """Formats with four digits; in scientific notation for the perplexity of a diverged model."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4e}"
