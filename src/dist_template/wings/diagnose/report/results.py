"""The final figures of a run, and of several runs side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from ....observe.history import goodput
from ....observe.history.run import History
from ....table import Table

Of = Callable[[History], float | None]

AT_TOKENS = ("train/loss", "eval/loss", "eval/bits_per_byte", "eval/token_accuracy")


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


def _last(name: str) -> Of:
    """Returns a function for the last value, also if it is NaN."""
    return lambda history: history.metrics[name].last if name in history.metrics else None


def _over_all(name: str, what: Callable[[np.ndarray], float]) -> Of:
    """Returns a function that applies `what` to all finite values."""

    def of(history: History) -> float | None:
        values = history.metrics[name].finite().values
        return float(what(values)) if len(values) else None

    return of


def _warm_median(values: np.ndarray) -> float:
    """Returns the median without the first value, which includes the warm-up."""
    return float(np.median(values[1:] if len(values) > 1 else values))


def steps(history: History) -> int:
    """Returns the last optimizer step that the run has recorded."""
    ends = [int(history.metrics[name].steps[-1]) for name in history.metrics.names]
    ends += [int(line["step"]) for line in goodput.read_attempts(history.folder)[-1:]]
    return max([*ends, *(int(crash.get("step") or 0) for crash in history.crashes)], default=0)


def attempts(history: History) -> int | None:
    return len({line["attempt"] for line in goodput.read_attempts(history.folder)}) or None


# Name, form and value of what is shown of every run, if it is known.
FIGURES: tuple[tuple[str, Callable[[float], str], Of], ...] = (
    ("optimizer steps", "{:,.0f}".format, steps),
    ("tokens", lambda value: short(value), _last("train/tokens")),
    ("train/loss", "{:.4f}".format, _last("train/loss")),
    ("eval/loss", "{:.4f}".format, _last("eval/loss")),
    ("eval/loss, best", "{:.4f}".format, _over_all("eval/loss", np.min)),
    ("eval/bits_per_byte", "{:.4f}".format, _last("eval/bits_per_byte")),
    ("tokens/s", "{:,.0f}".format, _over_all("perf/tokens_per_s", _warm_median)),
    ("MFU", "{:.1%}".format, _over_all("perf/mfu", _warm_median)),
    ("memory, most", "{:.1f} GiB".format, _over_all("memory/reserved_gib", np.max)),
    ("goodput", "{:.0%}".format, lambda run: goodput.share(run.goodput) if run.goodput else None),
    ("duration", clock, lambda run: sum(run.goodput.values()) if run.goodput else None),
    ("attempts", "{:.0f}".format, attempts),
)
IN_FIGURES = re.compile(
    "(train|eval|test)/(loss|tokens|perplexity|bits_per_byte|grad_norm|learning_rate)"
)


def short(value: float) -> str:
    """Formats 1234567 as "1.23 M"."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def figures(history: History) -> list[tuple[str, str]]:
    """Returns name and value of what is known of one run."""
    known = [(name, form, of(history)) for name, form, of in FIGURES]
    return [(name, form(value)) for name, form, value in known if value is not None]


def side_by_side(histories: list[History], names: list[str]) -> list[Table]:
    """Returns the final figures, and those at equal tokens: a column for each run."""
    own = sorted({name for history in histories for name in history.metrics.names})
    own = [name for name in own if re.match("(train|eval|test)/", name)]
    more = [(n, lambda v: f"{v:.4g}", _last(n)) for n in own if not IN_FIGURES.fullmatch(n)]
    rows = []
    for name, form, of in (*FIGURES, *more):
        rows.append((name, form, [of(history) for history in histories]))
    tables = [_table("Final figures", rows, names)]
    ends = [_last("train/tokens")(history) for history in histories]
    if all(ends) and len(histories) > 1:
        least = min(end for end in ends if end)
        rows = []
        for name in AT_TOKENS:
            values = [_at_tokens(history, name, least) for history in histories]
            rows.append((name, "{:.4f}".format, values))
        title = f"At equal tokens: {short(least)}, the length of the shortest run"
        tables.append(_table(title, rows, names))
    return tables


def _table(title: str, rows: list, names: list[str]) -> Table:
    cells = []
    for name, form, values in rows:
        if any(value is not None for value in values):
            cells.append([name, *("–" if value is None else form(value) for value in values)])
    return Table(title, ["", *names], cells)


def _at_tokens(history: History, name: str, tokens: float) -> float | None:
    """Returns the newest value at or before `tokens` of training; None if there is none."""
    series = history.metrics[name]
    reached = series[tokens_at(history, series.steps) <= tokens * (1 + 1e-9)]
    return reached.last if len(reached) else None


def tokens_at(history: History, steps: np.ndarray) -> np.ndarray:
    """Maps (N,) steps to (N,) tokens, linearly between two log steps, from 0 at step 0."""
    known = history.metrics["train/tokens"].finite()
    if not len(known):
        return np.full(len(steps), math.nan)
    return np.interp(steps, [0, *known.steps], [0.0, *known.values])
