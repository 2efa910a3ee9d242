"""Turns metrics over steps into plotly figures, thinned so that the page stays small.

A curve of many points is drawn by the least and the greatest value of each of some hundred buckets:
at the width of a screen no spike is lost (Jugel et al., "M4", VLDB 2014,
https://www.vldb.org/pvldb/vol7/p797-jugel.pdf). Non-finite values are gaps. A metric without finite
values has no curve, and a panel without curves is omitted.
"""

from __future__ import annotations

import fnmatch
import html
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ....observe.history.metrics import Series
from ....observe.history.run import History
from .results import tokens_at

BUCKETS = 200  # of a curve, two points each; half the pixels that a panel is wide on a large screen
MARKED = 40  # curves with at most so many points have markers
LEGEND = 12  # lines of a legend, at most; the hover text names every curve
# Okabe and Ito's colours, which colour-blind readers can distinguish, in shades that can be read on
# the light page and on the dark one.
COLOURS = ("#2f93c8", "#e07b39", "#2aa57c", "#c473a5", "#b57b00", "#5fb0e6", "#868c93")
DASHES = ("solid", "dot", "dash", "dashdot")


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
# Shown by another curve or by a figure, or not a curve; each other metric has its own panel.
NOT_DRAWN = {
    "train/perplexity", "eval/perplexity", "train/tokens", "perf/samples_per_s",
    "perf/tokens_per_s_per_device", "rank/slowest", "epoch", "health/errors", "health/warnings",
}  # fmt: skip


@dataclass
class Figure:
    """A panel, and plotly's data, x axis, y axis and layout."""

    panel: Panel
    data: list[dict[str, object]]
    x: Mapping[str, object]
    y: Mapping[str, object]
    layout: Mapping[str, object]


def figures(histories: list[History], names: list[str]) -> tuple[list[Figure], list[Figure]]:
    """Returns (panels that have data, one panel for each other metric)."""
    logged = sorted(set().union(*(history.metrics.names for history in histories)))
    panels, drawn = list(PANELS), set(NOT_DRAWN)
    for panel in PANELS:
        drawn.update(panel.metrics)
    for panel in LAYERS:
        found = tuple(fnmatch.filter(logged, panel.metrics[0]))
        drawn.update(found)
        if len(histories) == 1:
            panels.append(replace(panel, metrics=found))
    others = [Panel(name, "", (name,)) for name in logged if name not in drawn]
    draw = partial(_figure, histories=histories, names=names)
    return list(filter(None, map(draw, panels))), list(filter(None, map(draw, others)))


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


def thin(series: Series) -> Series:
    """Keeps the least and the greatest value of each of BUCKETS parts, if there are more points.

    A part without a finite value keeps its first, so that the gap remains.
    """
    if len(series) <= 2 * BUCKETS:
        return series
    finite = np.isfinite(series.values)
    low = np.where(finite, series.values, np.inf)
    high = np.where(finite, series.values, -np.inf)
    kept = set()
    for part in np.array_split(np.arange(len(series)), BUCKETS):
        kept |= {int(part[low[part].argmin()]), int(part[high[part].argmax()])}
    return series[sorted(kept)]


def _figure(panel: Panel, histories: list[History], names: list[str]) -> Figure | None:
    """Returns a plot; colours are the metrics of one run, or several runs, with dashed metrics."""
    curves: list[tuple[int, str, Series]] = []
    for run, history in enumerate(histories):
        for metric in panel.metrics:
            series = thin(history.metrics[metric])
            if len(series.finite()):
                curves.append((run, metric, series))
    if not curves:
        return None
    metrics = list(dict.fromkeys(metric for _, metric, _ in curves))
    labels = _labels(metrics)
    data: list[dict[str, object]] = []
    tokens: list[np.ndarray] = []  # of each curve, at its steps
    is_log, hover = panel.log, "%{y:.5~g}"
    y: dict[str, object] = {"exponentformat": "SI"}
    if panel.share:
        hover, y["tickformat"] = "%{y:.1%}", ".3~p"
    if panel.zero:
        y["rangemode"] = "tozero"
    for run, metric, series in curves:
        number = metrics.index(metric)
        name, colour, dash = labels[number], number, number // len(COLOURS)
        if len(histories) > 1:
            colour, dash = run, number
            name = f"{names[run]} {name}" if len(metrics) > 1 else names[run]
        style = {"color": COLOURS[colour % len(COLOURS)]}
        has_gaps = len(series) < BUCKETS and not np.isfinite(series.values).all()
        is_log = is_log and bool((series.finite().values > 0).all())
        tokens.append(tokens_at(histories[run], series.steps))
        data.append({
            "type": "scatter",
            "name": html.escape(name),
            "x": series.steps.tolist(),
            "y": _rounded(series.values),
            "mode": "lines+markers" if has_gaps or len(series) <= MARKED else "lines",
            "marker": {"size": 5, **style},
            "line": {"width": 1.6, "dash": DASHES[dash % len(DASHES)], **style},
            "hovertemplate": hover,
        })  # fmt: skip
    y["type"] = "log" if is_log else "linear"
    x = {"title": {"text": "optimizer step", "standoff": 6}, "rangemode": "tozero"}
    buttons = [_buttons(data, tokens, is_log)]
    layout = {"showlegend": 1 < len(data) <= LEGEND, "updatemenus": buttons}
    return Figure(panel, data, x, y, layout)


def _buttons(data: list[dict[str, object]], tokens: list[np.ndarray], is_log: bool) -> dict[str, object]:
    """Returns the buttons above a plot: what the x axis shows, and the scale of the y axis."""
    scales = [{"yaxis.type": "log"}, {"yaxis.type": "linear"}]
    first, second = scales[::-1] if is_log else scales
    buttons = [{"label": "log", "method": "relayout", "args": [first], "args2": [second]}]
    if np.isfinite(np.concatenate(tokens)).all():
        columns = {"optimizer step": [trace["x"] for trace in data]}
        columns["tokens"] = list(map(_rounded, tokens))
        for title, x in columns.items():
            given = [{"x": x}, {"xaxis.title.text": title, "xaxis.autorange": True}]
            buttons.append({"label": title, "method": "update", "args": given})
    place = {"x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom", "pad": {"t": 0, "b": 0}}
    return place | {
        "type": "buttons",
        "direction": "right",
        "buttons": buttons,
        "showactive": False,
    }


def _labels(metrics: list[str]) -> list[str]:
    """Returns the parts of the names that differ: "train" and "eval" for losses."""
    columns = list(zip(*(metric.split("/") for metric in metrics), strict=False))
    differing = [column for column in columns if len(set(column)) > 1] or columns
    return list(map("/".join, zip(*differing, strict=True)))


def _rounded(values: np.ndarray) -> list[float]:
    """Rounds to six digits, so that the page is small; plotly writes NaN as null."""
    return list(map(float, map("{:.6g}".format, values)))
