"""Curves as SVG in the page itself: shown where plotly.js is not, such as in a page that was moved
without the file beside it."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .curves import Trace

LEFT, RIGHT, TOP, BOTTOM = 70, 10, 28, 26  # pixels around the curves
SIZE = 1000  # of the curves, which are stretched to the figure; texts and strokes are not
MOST_POINTS = 200  # of a curve: the page stays small


def svg(traces: Sequence[Trace]) -> str:
    """Returns an SVG of the traces' finite values, with the ends of both axes and the names."""
    curves: list[Any] = [(trace, _points(trace)) for trace in traces]
    every = [point for _, points in curves for point in points if math.isfinite(point[1])]
    xs, ys = ([point[axis] for point in every] for axis in (0, 1))
    (left, right), (low, high) = (min(xs), max(xs)), (min(ys), max(ys))

    def place(x: float, y: float) -> str:
        across = (x - left) / (right - left or 1) * SIZE
        up = ((y - low) / (high - low) if high > low else 0.5) * SIZE
        return f"{across:.1f},{SIZE - up:.1f}"

    lines, names = [], []
    for trace, points in curves:
        colour = html.escape(str(trace["line"]["color"]))
        for run in _without_gaps(points):
            width = 1.6 if len(run) > 1 else 6  # a point is a line without length
            at = " ".join(place(x, y) for x, y in (run if len(run) > 1 else run * 2))
            lines.append(f'<polyline points="{at}" stroke="{colour}" stroke-width="{width}"/>')
        # names are escaped already, for plotly
        names.append(f'<tspan dx="12" fill="{colour}">{trace["name"]}</tspan>')
    texts = [
        _text(f'x="{LEFT - 6}" y="{TOP + 4}"', f"{high:.4g}", "end"),
        _text(f'x="{LEFT - 6}" y="100%" dy="-{BOTTOM}"', f"{low:.4g}" * (high > low), "end"),
        _text(f'x="{LEFT}" y="100%" dy="-6"', f"step {left:.0f}", "start"),
        _text(f'x="100%" dx="-{RIGHT}" y="100%" dy="-6"', f"{right:.0f}" * (right > left), "end"),
        _text(f'x="{LEFT - 12}" y="14"', "".join(names) if len(names) > 1 else "", "start"),
    ]
    size = f"left: {LEFT}px; top: {TOP}px; width: calc(100% - {LEFT + RIGHT}px);"
    size += f" height: calc(100% - {TOP + BOTTOM}px)"
    view = f'viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none"'
    drawing = f'<svg role="img" style="{size}" {view}>{"".join(lines)}</svg>'
    return f'<div class="plain">{drawing}<svg>{"".join(texts)}</svg></div>'


def _points(trace: Any) -> list[tuple[float, float]]:
    """Returns at most MOST_POINTS points, with the last."""
    points = list(zip(trace["x"], trace["y"], strict=True))
    every = math.ceil(len(points) / MOST_POINTS)
    thinned = points[::every]
    return thinned if thinned[-1] == points[-1] else [*thinned, points[-1]]


def _without_gaps(points: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Returns the runs of points with finite values."""
    cuts = [-1, *(i for i, (_, y) in enumerate(points) if not math.isfinite(y)), len(points)]
    return [run for a, b in pairwise(cuts) if (run := points[a + 1 : b])]


def _text(at: str, text: str, anchor: str) -> str:
    return f'<text {at} font-size="12" fill="#7d868f" text-anchor="{anchor}">{text}</text>'
