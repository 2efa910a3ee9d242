"""Curves as SVG in the page itself: shown where plotly.js is not, such as in a page that was moved
without the file beside it.

The points are thinned, divided at values that are not finite, and stretched to a square of SIZE,
which the page stretches to the figure; texts are placed around it."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from .curves import Trace

LEFT, RIGHT, TOP, BOTTOM = 70, 10, 28, 26  # pixels around the curves
# Width and height of the curves, which are stretched to the figure; texts and strokes are not.
SIZE = 1000
MOST_POINTS = 200  # of a curve: the page stays small

Point = tuple[float, float]


def svg(traces: Sequence[Trace]) -> str:
    """Returns an SVG of the traces' finite values, with the ends of both axes and the names."""
    curves: list[Any] = [(trace, _points(trace)) for trace in traces]
    xs: list[float] = []
    ys: list[float] = []
    for _, points in curves:
        for x, y in points:
            if math.isfinite(y):
                xs.append(x)
                ys.append(y)
    left, right = min(xs), max(xs)
    low, high = min(ys), max(ys)

    def place(x: float, y: float) -> str:
        across = (x - left) / (right - left) if right > left else 0.0
        up = (y - low) / (high - low) if high > low else 0.5
        # y counts downwards in SVG
        return f"{across * SIZE:.1f},{SIZE - up * SIZE:.1f}"

    lines = []
    names = []
    for trace, points in curves:
        colour = html.escape(str(trace["line"]["color"]))
        for run in _without_gaps(points):
            width = 1.6
            if len(run) == 1:
                # A point is drawn as a thick line without length.
                width, run = 6, run * 2
            at = " ".join(place(x, y) for x, y in run)
            lines.append(f'<polyline points="{at}" stroke="{colour}" stroke-width="{width}"/>')
        # names are escaped already, for plotly
        names.append(f'<tspan dx="12" fill="{colour}">{trace["name"]}</tspan>')
    # Equal ends of an axis are written once; the name of a single curve is the panel's title.
    lowest = f"{low:.4g}" if high > low else ""
    last = f"{right:.0f}" if right > left else ""
    legend = "".join(names) if len(names) > 1 else ""
    texts = [
        _text(f'x="{LEFT - 6}" y="{TOP + 4}"', f"{high:.4g}", "end"),
        _text(f'x="{LEFT - 6}" y="100%" dy="-{BOTTOM}"', lowest, "end"),
        _text(f'x="{LEFT}" y="100%" dy="-6"', f"step {left:.0f}", "start"),
        _text(f'x="100%" dx="-{RIGHT}" y="100%" dy="-6"', last, "end"),
        _text(f'x="{LEFT - 12}" y="14"', legend, "start"),
    ]
    size = f"left: {LEFT}px; top: {TOP}px; width: calc(100% - {LEFT + RIGHT}px);"
    size += f" height: calc(100% - {TOP + BOTTOM}px)"
    view = f'viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none"'
    drawing = f'<svg role="img" style="{size}" {view}>{"".join(lines)}</svg>'
    return f'<div class="plain">{drawing}<svg>{"".join(texts)}</svg></div>'


def _points(trace: Any) -> list[Point]:
    """Returns every n-th point, at most MOST_POINTS of them, and the last."""
    points = list(zip(trace["x"], trace["y"], strict=True))
    every = math.ceil(len(points) / MOST_POINTS)
    thinned = points[::every]
    if thinned[-1] != points[-1]:
        thinned.append(points[-1])
    return thinned


def _without_gaps(points: list[Point]) -> list[list[Point]]:
    """Divides a curve at the values that are not finite."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        else:
            runs.append([])
    return [run for run in runs if run]


def _text(at: str, text: str, anchor: str) -> str:
    return f'<text {at} font-size="12" fill="#7d868f" text-anchor="{anchor}">{text}</text>'
