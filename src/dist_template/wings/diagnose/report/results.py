"""Final figures of one run or of several side by side, and the command that resumes a run."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ....checkpoint.manifest import SavedCheckpoint
from ....cluster.launch import Variable
from ....observe.history.run import History
from ....project import without
from ....table import Table

Value = Callable[[History], float | None]
Form = Callable[[float], str]

AT_TOKENS = ("train/loss", "eval/loss", "eval/bits_per_byte", "eval/token_accuracy")


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    if minutes:
        return f"{minutes} min {rest:02} s"
    return f"{seconds:.1f} s"


def short(value: float) -> str:
    """Formats 1234567 as "1.23 M"."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def steps(history: History) -> int:
    """Returns the last optimizer step that the run has recorded."""
    ends = [0]
    for name in history.metrics.names:
        ends.append(int(history.metrics[name].steps[-1]))
    for line in history.attempts()[-1:]:
        ends.append(int(line["step"]))
    for crash in history.crashes:
        ends.append(int(crash.get("step") or 0))
    return max(ends)


def attempts(history: History) -> int | None:
    found = {line["attempt"] for line in history.attempts()}
    return len(found) or None


def _last(name: str) -> Value:
    """Returns a function for the last value, also if it is NaN."""

    def value(history: History) -> float | None:
        series = history.metrics[name]
        return series.last if len(series) else None

    return value


def _over_all(name: str, summary: Callable[[np.ndarray], float]) -> Value:
    """Returns a function for a summary of all finite values."""

    def value(history: History) -> float | None:
        values = history.metrics[name].finite().values
        return float(summary(values)) if len(values) else None

    return value


def _warm_median(values: np.ndarray) -> float:
    """Returns the median without the first value, which includes the warm-up."""
    if len(values) > 1:
        values = values[1:]
    return float(np.median(values))


def _duration(history: History) -> float | None:
    return sum(history.goodput.values()) or None


# Name, form and value of what is shown of every run, if it is known.
FIGURES: tuple[tuple[str, Form, Value], ...] = (
    ("optimizer steps", "{:,.0f}".format, steps),
    ("tokens", short, _last("train/tokens")),
    ("train/loss", "{:.4f}".format, _last("train/loss")),
    ("eval/loss", "{:.4f}".format, _last("eval/loss")),
    ("eval/loss, best", "{:.4f}".format, _over_all("eval/loss", np.min)),
    ("eval/bits_per_byte", "{:.4f}".format, _last("eval/bits_per_byte")),
    ("tokens/s", "{:,.0f}".format, _over_all("perf/tokens_per_s", _warm_median)),
    ("MFU", "{:.1%}".format, _over_all("perf/mfu", _warm_median)),
    ("memory, most", "{:.1f} GiB".format, _over_all("memory/reserved_gib", np.max)),
    ("goodput", "{:.0%}".format, lambda history: history.productive_share),
    ("duration", clock, _duration),
    ("attempts", "{:.0f}".format, attempts),
)
IN_FIGURES = re.compile("(train|eval|test)/(loss|tokens|perplexity|bits_per_byte|grad_norm|learning_rate)")


def figures(history: History) -> list[tuple[str, str]]:
    """Returns name and value of what is known of one run."""
    known = []
    for name, form, value_of in FIGURES:
        value = value_of(history)
        if value is not None:
            known.append((name, form(value)))
    return known


def side_by_side(histories: list[History], names: list[str]) -> list[Table]:
    """Returns the final figures, and those at equal tokens: a column for each run."""
    final = Table("Final figures", ["", *names], [])
    for name, form, value_of in FIGURES:
        _add(final, name, form, list(map(value_of, histories)))
    logged = set().union(*(history.metrics.names for history in histories))
    for name in sorted(logged):
        if re.match("(train|eval|test)/", name) and not IN_FIGURES.fullmatch(name):
            _add(final, name, "{:.4g}".format, list(map(_last(name), histories)))
    ends = list(map(_last("train/tokens"), histories))
    if len(histories) < 2 or not all(ends):
        return [final]
    least = min(end for end in ends if end)
    title = f"At equal tokens: {short(least)}, the length of the shortest run"
    equal = Table(title, ["", *names], [])
    for name in AT_TOKENS:
        values: list[float | None] = []
        for history in histories:
            series = history.metrics[name]
            reached = series[tokens_at(history, series.steps) <= least * (1 + 1e-9)]
            values.append(reached.last if len(reached) else None)
        _add(equal, name, "{:.4f}".format, values)
    return [final, equal]


def _add(table: Table, name: str, form: Form, values: Sequence[float | None]) -> None:
    """Adds a row, unless no run has the value."""
    cells = [name]
    for value in values:
        cells.append("–" if value is None else form(value))
    if any(value is not None for value in values):
        table.rows.append(cells)


def tokens_at(history: History, steps: np.ndarray) -> np.ndarray:
    """Maps (N,) steps to (N,) tokens, linearly between two log steps, from 0 at step 0."""
    known = history.metrics["train/tokens"].finite()
    if not len(known):
        return np.full(len(steps), math.nan)
    return np.interp(steps, [0, *known.steps], [0.0, *known.values])


def checkpoints(history: History) -> list[SavedCheckpoint]:
    """Returns the run's checkpoints, the newest first and the best ones last, damaged ones too."""
    inside = history.folder / "checkpoints"  # also if the run's folder was moved
    if inside.exists():
        return SavedCheckpoint.all_in(inside)
    configured = str(history.key("last_checkpoint.dirpath", ""))
    return SavedCheckpoint.all_in(Path(configured.replace("{run}", str(history.folder))))


def resume(history: History) -> tuple[str, str]:
    """Returns what the command does, and the command with the run's name; ("", "") if unknown."""
    words = history.environment.get("command") or []
    if "fit" not in words:  # a worker of a rehearsal, or nothing
        return "", ""
    done, last = steps(history), history.key("trainer.max_steps", -1)
    words = without(words, "--ckpt_path")
    if not any(saved.damage is None for saved in checkpoints(history)):
        return "There is no checkpoint to resume from; this starts the run again", shlex.join(words)
    sentence = "This resumes from the newest valid checkpoint, in the same folder"
    if isinstance(last, int) and 0 < last <= done:
        words = [*without(words, "--trainer.max_steps"), "--trainer.max_steps", str(2 * done)]
        sentence = "The run has done all its steps; this trains as many again"
    return sentence, f"{Variable.RUN_ID}={shlex.quote(history.folder.name)} {shlex.join(words)}"
