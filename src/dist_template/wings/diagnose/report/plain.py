"""Curves as SVG in the page itself: shown where plotly.js is not, such as in a page that was moved
without the file beside it."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .curves import Trace

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 70, 10, 24, 24
MOST_POINTS = 200  # of a curve: the page stays small


def svg(traces: Sequence[Trace]) -> str:
    """Returns an SVG of the traces' finite values, with the ends of both axes and the names."""
    curves: list[Any] = [(trace, _points(trace)) for trace in traces]
    every = [point for _, points in curves for point in points if math.isfinite(point[1])]
    xs, ys = ([point[axis] for point in every] for axis in (0, 1))
    (left, right), (low, high) = (min(xs), max(xs)), (min(ys), max(ys))

    def place(x: float, y: float) -> str:
        across = (x - left) / (right - left or 1) * (WIDTH - LEFT - RIGHT)
        up = ((y - low) / (high - low) if high > low else 0.5) * (HEIGHT - TOP - BOTTOM)
        return f"{LEFT + across:.1f},{HEIGHT - BOTTOM - up:.1f}"

    parts = [
        _text(LEFT - 6, TOP + 4, f"{high:.4g}", "end"),
        _text(LEFT - 6, HEIGHT - BOTTOM, f"{low:.4g}" if high > low else "", "end"),
        _text(LEFT, HEIGHT - 6, f"step {left:.0f}", "start"),
        _text(WIDTH - RIGHT, HEIGHT - 6, f"{right:.0f}" if right > left else "", "end"),
    ]
    for number, (trace, points) in enumerate(curves):
        colour = html.escape(str(trace["line"]["color"]))
        for run in _without_gaps(points):
            at = " ".join(place(x, y) for x, y in run)
            line = f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
            spot = f'<circle cx="{at.split(",")[0]}" cy="{at.split(",")[-1]}" r="3"/>'
            parts.append(line if len(run) > 1 else spot.replace("/>", f' fill="{colour}"/>'))
        if len(curves) > 1:  # names are escaped already, for plotly
            name = str(trace["name"])
            parts.append(_text(LEFT + 4, TOP + 14 * number - 8, name, "start", colour))
    return f'<svg class="plain" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


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


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#7d868f") -> str:
    style = f'font-size="12" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{text}</text>'
