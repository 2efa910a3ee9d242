"""Curves: metrics over steps become plotly's figures, thinned so that a page of them stays small.

A curve of many points is drawn as the mean of each of some hundred buckets, in the band of their least and greatest
values: at the width of a screen no spike is lost (the reason for minima and maxima: Jugel et al., "M4", VLDB 2014,
https://www.vldb.org/pvldb/vol7/p797-jugel.pdf). What is not finite is a gap. A metric without finite values has no
curve, and a panel without curves is left out.
"""

from __future__ import annotations

import fnmatch
import html
import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..history.metrics import Series
from ..history.run import History
from .results import tokens_at

BUCKETS = 400  # of a curve; half the pixels that a panel is wide on a large screen
ALL_BUCKETS = 1600  # of all runs' curves in one panel, at most
POINTS = 40  # so few are marked, each
KNOTS = 200  # of the map from steps to tokens and hours
COLOURS = 7  # of the page's theme
DASHES = ("solid", "dot", "dash", "dashdot")  # metrics, where colours are runs


@dataclass(frozen=True)
class Panel:
    """One plot. `log` only where all values are positive; `zero`: the axis begins there, so that noise looks small."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    log: bool = False
    share: bool = False
    zero: bool = False


PANELS = (
    Panel("Loss", "nats per token", ("train/loss", "eval/loss")),
    Panel("Bits per byte", "of the validation text", ("eval/bits_per_byte",)),
    Panel("Learning rate", "", ("train/learning_rate",), zero=True),
    Panel("Gradient norm", "before clipping", ("train/grad_norm",), log=True),
    Panel("Throughput", "tokens per second, all processes", ("perf/tokens_per_s",), zero=True),
    Panel("MFU", "share of the hardware's peak", ("perf/mfu",), share=True, zero=True),
    Panel("Memory", "GiB, the fullest process", ("memory/allocated_gib", "memory/reserved_gib"), zero=True),
    Panel("Waiting for data", "share of the step", ("perf/data_wait_share",), share=True, zero=True),
    Panel("GPU utilization", "mean of all", ("gpu/utilization",), share=True, zero=True),
    Panel("Slowest process", "times the median", ("rank/slowest_over_median",)),
    Panel("Expert load", "busiest over mean, worst layer{ceiling}", ("moe/expert_load_max_over_mean",)),
    Panel("Token accuracy", "share", ("train/token_accuracy", "eval/token_accuracy"), share=True, zero=True),
)
# Of one run alone: a curve for each layer, at "*".
LAYERS = (
    Panel("Expert load by layer", "busiest over mean{ceiling}", ("moe/layer_*/load_max_over_mean",)),
    Panel("Least used expert by layer", "over mean, 1 is even", ("moe/layer_*/load_min_over_mean",), zero=True),
    Panel("Entropy of the load by layer", "share of ln(experts), 1 is even", ("moe/layer_*/load_entropy",), zero=True),
)
# Told by another curve, by a figure, or not a curve; all others have a panel of their own, behind a click.
NOT_DRAWN = {
    "train/perplexity",
    "eval/perplexity",
    "train/tokens",
    "perf/samples_per_s",
    "perf/tokens_per_s_per_device",
}
NOT_DRAWN |= {"rank/slowest", "epoch", "health/errors", "health/warnings"}


@dataclass
class Figure:
    """A panel, drawn.

    Args:
        lines: What a legend says: (name, colour's number, dash).
        plot: plotly's data and layout; colours are numbers in each trace's `meta`, which the page's theme fills in.
    """

    panel: Panel
    lines: list[tuple[str, int, str]] = field(default_factory=list)
    plot: dict[str, Any] = field(default_factory=dict)


def figures(histories: list[History], names: list[str]) -> tuple[list[Figure], list[Figure]]:
    """The panels that have data, and those of all other metrics."""
    logged = sorted({name for history in histories for name in history.metrics.names})
    by_layer = [replace(panel, metrics=tuple(fnmatch.filter(logged, panel.metrics[0]))) for panel in LAYERS]
    drawn = {name for panel in (*PANELS, *by_layer) for name in panel.metrics} | NOT_DRAWN
    first = [*PANELS, *(by_layer if len(histories) == 1 else [])]
    rest = [Panel(name, "", (name,)) for name in logged if name not in drawn]
    made = [_figure(panel, histories, names) for panel in (*first, *rest)]
    return [f for f in made[: len(first)] if f.lines], [f for f in made[len(first) :] if f.lines]


def _unit(panel: Panel, histories: list[History]) -> str:
    """The panel's unit, with the largest possible load over the mean."""
    numbers = [(h.fact("model.experts"), h.fact("model.experts_per_token")) for h in histories]
    ceilings = {f"{experts / chosen:.3g}" for experts, chosen in numbers if experts and chosen}
    return panel.unit.format(ceiling=f", at most {' or '.join(sorted(ceilings))}" if ceilings else "")


def not_finite(history: History) -> list[str]:
    """A sentence for each metric that is drawn and has gaps."""
    found = []
    for name in sorted(set(history.metrics.names) - NOT_DRAWN):
        series = history.metrics[name]
        bad = series[~np.isfinite(series.values)]
        if len(bad):
            found.append(
                f"{name}: {len(bad)} of {len(series)} values are not finite, the first at step {bad.steps[0]}."
            )
    return found


def axes(histories: list[History]) -> list[dict[str, list[float]]]:
    """For each run, at which tokens and hours a step was: what the page turns the x axis by."""
    found = []
    for history in histories:
        series = max(
            (history.metrics[name] for name in history.metrics.names), key=len, default=Series(*np.empty((3, 0)))
        )
        which = np.unique(np.linspace(0, max(len(series) - 1, 0), KNOTS).astype(int)) if len(series) else []
        knots = series[which] if len(series) else series
        tokens = tokens_at(history, knots.steps)
        columns = {"steps": knots.steps, "hours": (knots.times - knots.times[:1]) / 3600}
        columns |= {"tokens": tokens} if len(tokens) and np.isfinite(tokens).all() else {}
        found.append({key: _rounded(values) for key, values in columns.items()})
    return found


def thin(series: Series, buckets: int) -> tuple[Series, np.ndarray, np.ndarray] | None:
    """Means of `buckets` parts of equally many entries, and their least and greatest values; None: it is short enough.

    A bucket without a finite value is NaN in all three.
    """
    if len(series) <= 2 * buckets:
        return None
    starts = np.linspace(0, len(series), buckets, endpoint=False).astype(int)
    finite = np.isfinite(series.values)
    count = np.add.reduceat(finite, starts, dtype=float)
    count[count == 0] = np.nan
    means = np.add.reduceat(np.where(finite, series.values, 0.0), starts) / count
    low = np.minimum.reduceat(np.where(finite, series.values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, series.values, -np.inf), starts)
    middle = (starts + np.append(starts[1:], len(series)) - 1) // 2
    gap = np.isnan(count)
    return (
        Series(series.steps[middle], means, series.times[middle]),
        np.where(gap, np.nan, low),
        np.where(gap, np.nan, high),
    )


def _figure(panel: Panel, histories: list[History], names: list[str]) -> Figure:
    import plotly.graph_objects as go

    figure, traces = Figure(replace(panel, unit=_unit(panel, histories))), []
    present = [m for m in panel.metrics if any(len(h.metrics[m].finite()) for h in histories)]
    buckets = min(BUCKETS, ALL_BUCKETS // max(1, len(histories)))
    log = panel.log
    for run, history in enumerate(histories):
        for number, metric in enumerate(present):
            series = history.metrics[metric]
            finite = series.finite().values
            if not len(finite):
                continue
            log = log and bool((finite > 0).all())
            if len(histories) == 1:
                colour, dash = number % COLOURS, DASHES[number // COLOURS % len(DASHES)]
            else:
                colour, dash = run, DASHES[number % len(DASHES)]
            name = metric if len(histories) == 1 else f"{names[run]} {metric}" if len(present) > 1 else names[run]
            line = (_told_apart(metric, present), colour, dash)
            figure.lines += [line] if line not in figure.lines else []
            traces += _traces(go, series, buckets, html.escape(name), {"run": run, "colour": colour}, dash, panel.share)
    y = {"type": "log" if log else "linear", "tickformat": ".3~p" if panel.share else None, "exponentformat": "SI"}
    y["rangemode"] = "tozero" if panel.zero else "normal"
    layout = {"template": None, "xaxis": {"rangemode": "tozero"}, "yaxis": y, "showlegend": False}
    figure.plot = json.loads(go.Figure(traces, layout).to_json()) if traces else {}
    return figure


def _told_apart(metric: str, present: list[str]) -> str:
    """Of "train/loss" as much as tells it from the others: "train" where all are losses."""
    kind, _, what = metric.partition("/")
    if len(present) == 1:
        return metric
    if what.startswith("layer_"):
        return what.partition("/")[0].replace("_", " ")
    return kind if all(other.partition("/")[2] == what for other in present) else what


def _traces(
    go: Any, series: Series, buckets: int, name: str, meta: dict[str, int], dash: str, share: bool
) -> list[Any]:
    """The curve, and under it its band where it was thinned."""
    traces = []
    if thinned := thin(series, buckets):
        series, low, high = thinned
        edges = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "x": series.steps.tolist()}
        traces = [
            go.Scatter(y=_rounded(low), meta=meta | {"band": 1}, **edges),
            go.Scatter(y=_rounded(high), meta=meta | {"band": 2}, fill="tonexty", **edges),
        ]
    marked = len(series) <= POINTS or (not np.isfinite(series.values).all() and not thinned)
    traces.append(
        go.Scatter(
            x=series.steps.tolist(),
            y=_rounded(series.values),
            name=name,
            meta=meta,
            mode="lines+markers" if marked else "lines",
            line={"width": 1.6, "dash": dash},
            marker={"size": 5},
            hovertemplate="%{y:.1%}" if share else "%{y:.5~g}",
        )
    )
    return traces


def _rounded(values: np.ndarray) -> list[Any]:
    """To six digits, as JSON has them: what is not finite is null."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
