"""Console output: one line of progress, in place on a terminal, line by line in a log file."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from functools import partial, wraps
from typing import Any, TextIO

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only

from ..cluster.messages import is_rank_zero
from ..errors import Ended, another_rank_is_gone, reason
from ..model.any_module import results_of

# (metric, format, rank): on a narrow terminal the highest rank is omitted first; metrics without a value always are
COLUMNS = (
    ("train/loss", "loss {:.3f}", 1),
    ("train/grad_norm", "norm {:.2f}", 8),
    ("train/learning_rate", "lr {:.2e}", 6),
    ("perf/tokens_per_s", "{:,.0f} tok/s", 4),
    ("perf/samples_per_s", "{:,.0f} samples/s", 4),  # where samples are no sequences
    ("perf/mfu", "mfu {:.0%}", 5),
    ("perf/data_wait_share", "wait {:.0%}", 7),
)
HEALTH = 36  # characters of a finding's title


def only_shows(hook: Any) -> Any:
    """Decorates a callback's method that only shows something: an error in it is reported once, and training continues.

    What concerns other ranks too is still raised: a lost rank, and a decision of all ranks.
    """
    reported: set[str] = set()

    @wraps(hook)
    def guarded(callback: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(callback, *args, **kwargs)
        except Ended:
            raise
        except Exception as error:
            if another_rank_is_gone(error):
                raise
            what = f"{type(callback).__name__.lower()}: {type(error).__name__}: {reason(error)}"
            if what not in reported and is_rank_zero():
                print(f"note: {what}; training continues without it", flush=True)
            reported.add(what)

    return guarded


class Console(Callback):
    """Prints training progress and validation results on rank 0, at log steps; reads nothing from the device.

    A terminal shows one line, updated in place and never wrapped; a log file gets plain lines.

    Args:
        bar_width: Characters of the bar. 0 shows none.
        line_every_s: Seconds between lines if the output is not a terminal. 0 prints one at every log step.
    """

    worst = ""  # title of the worst open finding; callbacks/diagnosis.py keeps it

    def __init__(self, bar_width: int = 24, line_every_s: float = 10.0) -> None:
        self.bar_width = bar_width
        self.line_every_s = line_every_s
        self._terminal = sys.stdout.isatty()
        self._started = self._printed = 0.0
        self._first_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.perf_counter()
        self._first_step = trainer.global_step

    @rank_zero_only
    @only_shows
    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        now = time.perf_counter()
        step, total = trainer.global_step, trainer.estimated_stepping_batches
        final = step == total
        if not self._terminal and not final and now - self._printed < self.line_every_s:
            return
        self._printed = now
        parts = [(f"step {step}/{total}" if total != float("inf") else f"step {step}", 0)]
        hidden = {"perf/samples_per_s"} if "perf/tokens_per_s" in metrics else set()
        shown = [each for each in COLUMNS if each[0] in metrics.keys() - hidden]
        parts += [(form.format(metrics[name]), rank) for name, form, rank in shown]
        if total != float("inf") and step > self._first_step:
            rate_s = (now - self._started) / (step - self._first_step)
            parts.append((f"eta {_clock((total - step) * rate_s)}", 2))
        if "health/errors" in metrics:  # diagnosis is on
            parts.append((textwrap.shorten(self.worst or "ok", HEALTH, placeholder="…"), 3))
        bar = self._bar(step / total) if total != float("inf") else ""
        line = self._fitted(bar, parts)
        if self._terminal:
            print(f"\r\x1b[K{line}", end="\n" if final else "", flush=True)
        else:
            print(line, flush=True)

    def _fitted(self, bar: str, parts: list[tuple[str, int]]) -> str:
        """Returns `bar` and as many of the parts as fit the terminal, in their order."""
        width = shutil.get_terminal_size().columns - 1 if self._terminal else sys.maxsize
        while True:
            line = bar + "  ".join(text for text, _ in parts)
            if len(line) <= width or (not bar and len(parts) == 1):
                return line[:width]
            if bar:
                bar = ""
            else:
                parts.remove(max(parts, key=lambda part: part[1]))

    @only_shows
    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        when = "before training" if trainer.sanity_checking else f"at step {trainer.global_step}"
        title = f"validation {when}" if trainer.sanity_checking or trainer.global_step else "validation"
        self._show_results(title, results_of(trainer, pl_module))  # `validate` alone counts no steps

    @only_shows
    def on_test_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._show_results("test", results_of(trainer, pl_module))

    def _show_results(self, title: str, metrics: dict[str, float]) -> None:
        shown = "  ".join(f"{name.split('/')[-1]} {figure(value)}" for name, value in metrics.items())
        self.write(f"{title}: {shown}")

    @rank_zero_only
    def write(self, text: str, file: TextIO | None = None) -> None:
        """Prints complete lines without breaking the progress line."""
        clear = "\r\x1b[K" if self._terminal else ""
        print(clear + text, file=file, flush=True)

    def _bar(self, share: float) -> str:
        if not (self._terminal and self.bar_width):
            return ""
        filled = round(share * self.bar_width)
        return "━" * filled + "╌" * (self.bar_width - filled) + "  "


def write_lines(trainer: Any, text: str, file: TextIO | None = None) -> None:
    """Prints complete lines on this rank, through the trainer's console if it has one."""
    console = console_of(trainer)
    (console.write if console else partial(print, flush=True))(text, file=file)


def console_of(trainer: Any) -> Console | None:
    return next((each for each in trainer.callbacks if isinstance(each, Console)), None)


def figure(value: float) -> str:
    """Formats with four digits; in scientific notation for the perplexity of a diverged model."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4e}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
