"""Turns metrics over steps into plotly figures, thinned so that the page stays small.

A curve of many points is drawn as the mean of each of some hundred buckets, in a band of their
least and greatest values: at the width of a screen no spike is lost (the reason for minima and
maxima: Jugel et al., "M4", VLDB 2014, https://www.vldb.org/pvldb/vol7/p797-jugel.pdf). Non-finite
values are gaps. A metric without finite values has no curve, and a panel without curves is omitted.
"""

from __future__ import annotations

import fnmatch
import html
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....observe.history.metrics import Series
from ....observe.history.run import History
from .results import tokens_at

BUCKETS = 400  # of a curve; half the pixels that a panel is wide on a large screen
ALL_BUCKETS = 1600  # of all runs' curves in one panel, at most
POINTS = 40  # curves with at most so many points have markers
KNOTS = 200  # of the map from steps to tokens and hours
COLOURS = 7  # of the page's theme
DASHES = ("solid", "dot", "dash", "dashdot")
LEGEND = 12  # lines of a legend, at most; the hover text names every curve


@dataclass(frozen=True)
class Panel:
    """One plot. `log` applies if all values are positive; with `zero` the axis starts at 0."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    log: bool = False
    share: bool = False
    zero: bool = False


MEMORY = ("memory/allocated_gib", "memory/reserved_gib")
ACCURACY = ("train/token_accuracy", "eval/token_accuracy")
PANELS = (
    Panel("Loss", "nats per token", ("train/loss", "eval/loss")),
    Panel("Bits per byte", "of the validation text", ("eval/bits_per_byte",)),
    Panel("Learning rate", "", ("train/learning_rate",), zero=True),
    Panel("Gradient norm", "before clipping", ("train/grad_norm",), log=True),
    Panel("Throughput", "tokens per second, all processes", ("perf/tokens_per_s",), zero=True),
    Panel("MFU", "share of the hardware's peak", ("perf/mfu",), share=True, zero=True),
    Panel("Memory", "GiB, the fullest process", MEMORY, zero=True),
    Panel("Waiting for data", "share of a step", ("perf/data_wait_share",), share=True, zero=True),
    Panel("GPU utilization", "mean of all", ("gpu/utilization",), share=True, zero=True),
    Panel("Slowest process", "times the median", ("rank/slowest_over_median",)),
    Panel("Expert load", "busiest over mean, worst layer", ("moe/expert_load_max_over_mean",)),
    Panel("Token accuracy", "share", ACCURACY, share=True, zero=True),
)
# Only in the report of one run: a curve for each layer, at "*".
LAYERS = (
    Panel("Expert load by layer", "busiest over mean", ("moe/layer_*/load_max_over_mean",)),
    Panel("Least load by layer", "least over mean", ("moe/layer_*/load_min_over_mean",), zero=True),
    Panel("Load entropy by layer", "over ln(experts)", ("moe/layer_*/load_entropy",), zero=True),
)
# Shown by another curve or by a figure, or not a curve; each other metric has its own folded panel.
NOT_DRAWN = {
    "train/perplexity", "eval/perplexity", "train/tokens", "perf/samples_per_s",
    "perf/tokens_per_s_per_device", "rank/slowest", "epoch", "health/errors", "health/warnings",
}  # fmt: skip


@dataclass
class Figure:
    """A panel, and plotly's data and layout; `meta` of a trace has the run and the colour."""

    panel: Panel
    plot: dict[str, Any]

    @property
    def is_log(self) -> bool:
        return self.plot["layout"]["yaxis"]["type"] == "log"


def figures(histories: list[History], names: list[str]) -> tuple[list[Figure], list[Figure]]:
    """Returns the panels that have data, and those of all other metrics."""
    logged = sorted({name for history in histories for name in history.metrics.names})
    first, drawn = list(PANELS), set(NOT_DRAWN)
    for panel in LAYERS:
        found = tuple(fnmatch.filter(logged, panel.metrics[0]))
        drawn |= {*found}
        if len(histories) == 1:
            first.append(replace(panel, metrics=found))
    drawn |= {name for panel in PANELS for name in panel.metrics}
    rest = [Panel(name, "", (name,)) for name in logged if name not in drawn]
    shown = [_figure(panel, histories, names) for panel in first]
    more = [_figure(panel, histories, names) for panel in rest]
    return [f for f in shown if f.plot["data"]], [f for f in more if f.plot["data"]]


def not_finite(history: History) -> list[str]:
    """Returns a sentence for each metric whose curve has gaps."""
    found = []
    for name in sorted(set(history.metrics.names) - NOT_DRAWN):
        series = history.metrics[name]
        gaps = series[~np.isfinite(series.values)]
        if len(gaps):
            num = f"{name}: {len(gaps)} of {len(series)} values are not finite"
            found.append(f"{num}, the first at step {gaps.steps[0]}.")
    return found


def axes(histories: list[History]) -> list[dict[str, list[float]]]:
    """Returns steps of each run, and the tokens and hours at these steps, for other x axes."""
    found = []
    for history in histories:
        every = [history.metrics[name] for name in history.metrics.names]
        series = max(every, key=len, default=Series(*np.empty((3, 0))))
        indices = np.unique(np.linspace(0, max(len(series) - 1, 0), KNOTS).astype(int))
        knots = series[indices[: len(series)]]
        tokens = tokens_at(history, knots.steps)
        columns = {"steps": knots.steps, "hours": (knots.times - knots.times[:1]) / 3600}
        columns |= {"tokens": tokens} if len(tokens) and np.isfinite(tokens).all() else {}
        found.append({key: _rounded(values) for key, values in columns.items()})
    return found


def thin(series: Series, buckets: int) -> tuple[Series, np.ndarray, np.ndarray] | None:
    """Returns the means of `buckets` parts of equal size, their least and their greatest values.

    A bucket without a finite value is NaN in all three. Returns None if the series is short enough.
    """
    if len(series) <= 2 * buckets:
        return None
    starts = np.linspace(0, len(series), buckets, endpoint=False).astype(int)
    finite = np.isfinite(series.values)
    count = np.add.reduceat(finite, starts, dtype=float)
    count[count == 0] = np.nan
    means = np.add.reduceat(np.where(finite, series.values, 0.0), starts) / count
    low = np.minimum.reduceat(np.where(finite, series.values, np.inf), starts) + 0 * count
    high = np.maximum.reduceat(np.where(finite, series.values, -np.inf), starts) + 0 * count
    middle = (starts + np.append(starts[1:], len(series)) - 1) // 2
    return Series(series.steps[middle], means, series.times[middle]), low, high


def _figure(panel: Panel, histories: list[History], names: list[str]) -> Figure:
    """Returns a plot; colours are the metrics of one run, or several runs, with dashed metrics."""
    present = [m for m in panel.metrics if any(len(h.metrics[m].finite()) for h in histories)]
    labels = dict(zip(present, _labels(present), strict=True))
    one, traces, log = len(histories) == 1, [], panel.log
    for run, history in enumerate(histories):
        for number, metric in enumerate(present):
            series = history.metrics[metric]
            finite = series.finite().values
            if not len(finite):
                continue
            log = log and bool((finite > 0).all())
            colour, dash = (number, number // COLOURS) if one else (run, number)
            name = labels[metric] if one else names[run]
            if not one and len(present) > 1:
                name = f"{name} {labels[metric]}"
            meta = {"run": run, "colour": colour % COLOURS}
            style = {"width": 1.6, "dash": DASHES[dash % len(DASHES)]}
            line: dict[str, Any] = {"name": html.escape(name), "line": style}
            line["hovertemplate"] = "%{y:.1%}" if panel.share else "%{y:.5~g}"
            traces += _traces(series, min(BUCKETS, ALL_BUCKETS // len(histories)), meta, line)
    if not one and len(present) > 1:
        dashes = [f"{dash} {labels[metric]}" for metric, dash in zip(present, DASHES, strict=False)]
        panel = replace(panel, unit=f"{panel.unit}; {', '.join(dashes)}")
    y = {"type": "log" if log else "linear", "exponentformat": "SI"}
    y["tickformat"] = ".3~p" if panel.share else None
    y["rangemode"] = "tozero" if panel.zero else "normal"
    legend = one and 1 < len(present) <= LEGEND
    return Figure(panel, {"data": traces, "layout": {"yaxis": y, "showlegend": legend}})


def _labels(metrics: list[str]) -> list[str]:
    """Returns the parts of the names that differ: "train" and "eval" for losses."""
    columns = list(zip(*(metric.split("/") for metric in metrics), strict=False))
    differing = [column for column in columns if len(set(column)) > 1] or columns
    return ["/".join(parts) for parts in zip(*differing, strict=True)]


def _traces(
    series: Series, buckets: int, meta: dict[str, int], line: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns the curve, and below it its band if it was thinned."""
    traces = []
    if thinned := thin(series, buckets):
        series, low, high = thinned
        edge = {"x": series.steps.tolist(), "mode": "lines", "line": {"width": 0}}
        edge |= {"hoverinfo": "skip", "meta": meta, "showlegend": False}
        traces = [edge | {"y": _rounded(low)}, edge | {"y": _rounded(high), "fill": "tonexty"}]
    marked = len(series) <= POINTS or (not np.isfinite(series.values).all() and not thinned)
    points = {"x": series.steps.tolist(), "y": _rounded(series.values), "meta": meta}
    mode = {"mode": "lines+markers" if marked else "lines", "marker": {"size": 5}}
    return [*traces, points | line | mode]


def _rounded(values: np.ndarray) -> list[Any]:
    """Rounds to six digits; non-finite values become None, as JSON needs."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
