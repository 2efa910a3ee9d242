"""What a person watching sees: one line of progress, on a terminal in place, in a log file line by line."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only

# (metric, how it is shown); what was not measured is left out
COLUMNS = (
    ("train/loss", "loss {:.3f}"),
    ("train/grad_norm", "norm {:.2f}"),
    ("train/learning_rate", "lr {:.2e}"),
    ("perf/tokens_per_s", "{:,.0f} tok/s"),
    ("perf/data_wait_share", "wait {:.0%}"),
)


class Console(Callback):
    """Progress of training and results of validation, by rank 0, at log steps; reads nothing from the device.

    Args:
        bar_width: Characters of the bar. 0 shows none.
        line_every_s: Seconds between lines when the output is no terminal. 0 prints one at every log step.
    """

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
    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        now = time.perf_counter()
        step, total = trainer.global_step, trainer.estimated_stepping_batches
        final = step == total
        if not self._terminal and not final and now - self._printed < self.line_every_s:
            return
        self._printed = now
        parts = [f"step {step}/{total}" if total != float("inf") else f"step {step}"]
        parts += [form.format(metrics[name]) for name, form in COLUMNS if name in metrics]
        if total != float("inf") and step > self._first_step:
            rate_s = (now - self._started) / (step - self._first_step)
            parts.append(f"eta {_clock((total - step) * rate_s)}")
        bar = self._bar(step / total) if total != float("inf") else ""
        self._print(bar + "  ".join(parts), final=final)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        when = "before training" if trainer.sanity_checking else f"at step {trainer.global_step}"
        title = f"validation {when}" if trainer.sanity_checking or trainer.global_step else "validation"
        self._show_results(title, pl_module.eval_metrics)  # `validate` alone counts no steps

    def on_test_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._show_results("test", pl_module.eval_metrics)

    def _show_results(self, title: str, metrics: dict[str, float]) -> None:
        shown = "  ".join(f"{name.split('/')[1]} {value:.4f}" for name, value in metrics.items())
        self.say(f"{title}: {shown}")

    @rank_zero_only
    def say(self, text: str) -> None:
        """Print whole lines without tearing the progress line."""
        clear = "\r\x1b[K" if self._terminal else ""
        print(clear + text, flush=True)

    def _print(self, line: str, *, final: bool) -> None:
        if self._terminal:
            print(f"\r\x1b[K{line}", end="\n" if final else "", flush=True)
        else:
            print(line, flush=True)

    def _bar(self, share: float) -> str:
        if not (self._terminal and self.bar_width):
            return ""
        filled = round(share * self.bar_width)
        return "━" * filled + "╌" * (self.bar_width - filled) + "  "


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
