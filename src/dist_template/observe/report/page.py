"""The report as one HTML file with its style, its data and the script that draws the curves.

Texts that come from a run (samples, names, messages) are escaped by `tag` and `joined`.
plotly_js.py determines where the page loads plotly.js from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...project import program
from ...table import Table
from ..diagnosis.finding import LEVELS, Cause, Finding
from ..history.run import History
from . import curves
from .commands import resume
from .results import figures
from .sections import Section, Text, of_one, of_several, status, what

LONG = 40  # characters of a cell that may be broken into lines
OPEN = 3  # findings that are unfolded at first


class Html(str):
    """Text that is HTML already; any other text is escaped when it is put into an element."""


def tag(name: str, *inner: str, **attributes: Any) -> Html:
    """Returns an element; `data_axis` becomes the attribute data-axis, and `class_` class."""
    given = ""
    for key, value in attributes.items():
        given += f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
    return Html(f"<{name}{given}>{joined(inner)}</{name}>")


def joined(parts: Sequence[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def page(
    histories: list[History], names: list[str], findings: list[list[Finding]], link: str = ""
) -> str:
    """Returns the file's content: the report of one run, or the comparison of several.

    Args:
        histories: Of the runs.
        names: Of the runs.
        findings: Of each run.
        link: The address of plotly.js. Empty: the page contains it.
    """
    one = len(histories) == 1
    title = names[0] if one else f"{len(histories)} runs compared"
    shown, more = curves.figures(histories, names)
    plots = _curves(histories, names, shown, more, link)
    body = [tag("h1", title)]
    if one:
        body.append(tag("p", what(histories[0]), class_="soft"))
    body.append(tag("h2", "Verdict"))
    for history, name, found in zip(histories, names, findings, strict=True):
        body.append(_verdict(history, found, "" if one else name))
    if one:
        body += [_key_figures(histories[0]), _continue(histories[0]), plots]
        body += map(_section, of_one(histories[0]))
    else:
        body += [*map(_section, of_several(histories, names)), plots]
    drawn = [figure.plot for figure in [*shown, *more]]
    data = {"figures": drawn, "axes": curves.axes(histories)}
    return _document(title, joined(body), json.dumps(data, separators=(",", ":")), link)


def _document(title: str, body: Html, data: str, link: str = "") -> str:
    library = tag("script", src=link)
    if not link:
        from plotly.offline import get_plotlyjs

        library = tag("script", Html(get_plotlyjs()))
    data = data.replace("<", "\\u003c")  # or a text in it could end the element
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_own("page.css")}</style></head>
<body>{body}
<script type="application/json" id="curves">{data}</script>
{library}
<script>{_own("page.js")}</script></body></html>
"""


def _own(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _verdict(history: History, findings: Sequence[Finding], name: str) -> Html:
    """Returns the findings of one run; with its name, and folded, if it is one of several."""
    parts = [tag("h3", name)] if name else []
    if not findings:
        text = f": no rule found a problem. The run {status(history)}."
        kind = "error" if history.crashes else "good"
        title = tag("b", "No findings", class_="level")
        return joined([*parts, tag("div", title, text, class_=f"finding {kind}")])
    counted = []
    for level in LEVELS:
        if num := sum(finding.level == level for finding in findings):
            counted.append(f"{num} {level}{'s' * (num > 1 and level != 'info')}")
    parts.append(tag("p", f"{', '.join(counted)}. The run {status(history)}."))
    num_open = 0 if name else OPEN
    parts += [_finding(finding, number < num_open) for number, finding in enumerate(findings)]
    return joined(parts)


def _finding(finding: Finding, opened: bool) -> Html:
    title = (tag("span", finding.level, class_="level"), " ", tag("b", finding.title), " ")
    summary = tag("summary", *title, tag("span", finding.where, class_="soft"))
    causes = [tag("ol", *map(_cause, finding.causes))] if finding.causes else []
    attributes = {"open": ""} if opened else {}
    parts = [summary, tag("p", finding.evidence), *causes]
    return tag("details", *parts, class_=f"finding {finding.level}", **attributes)


def _cause(cause: Cause) -> Html:
    changes = []
    for change in cause.changes:
        remark = tag("span", change.remark, class_="soft")
        changes.append(tag("div", tag("code", change.flag), " ", remark))
    return tag("li", cause.sentence, *changes)


def _key_figures(history: History) -> Html:
    parts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in figures(history)]
    return tag("dl", *parts, class_="figures")


def _continue(history: History) -> Html:
    sentence, command = resume(history)
    parts = (tag("h2", "Continue"), tag("p", f"{sentence}:"), tag("pre", command, class_="command"))
    return joined(parts if command else [])


def _curves(
    histories: list[History],
    names: list[str],
    shown: list[curves.Figure],
    more: list[curves.Figure],
    link: str,
) -> Html:
    parts = [tag("h2", "Curves")]
    if not shown and not more:
        return joined([*parts, tag("p", "No metric was written.")])
    parts.append(_controls(histories, names))
    for history, name in zip(histories, names, strict=True):
        prefix = f"{name}: " if len(names) > 1 else ""
        for sentence in curves.not_finite(history):
            parts.append(tag("p", prefix + sentence, class_="gap"))
    parts.append(_missing(histories, link or "the page's plotly.js"))
    parts.append(tag("noscript", "Curves need JavaScript."))
    plots = [_plot(number, figure) for number, figure in enumerate([*shown, *more])]
    parts.append(tag("div", *plots[: len(shown)], class_="plots"))
    if more:
        summary = tag("summary", f"{len(more)} more metric{'s' * (len(more) > 1)}")
        parts.append(tag("details", summary, tag("div", *plots[len(shown) :], class_="plots")))
    return joined(parts)


def _controls(histories: list[History], names: list[str]) -> Html:
    """Returns the buttons of the x axes that all runs have, and a box for each of several runs."""
    known, parts = curves.axes(histories), []
    for axis in ("steps", "tokens", "hours"):
        if all(axis in each for each in known):
            pressed = str(axis == "steps").lower()
            parts.append(tag("button", axis, data_axis=axis, aria_pressed=pressed))
    for number, name in enumerate(names if len(names) > 1 else []):
        box = Html(f'<input type="checkbox" checked data-run="{number}"> ')
        colour = f"background: var(--c{number % curves.COLOURS})"
        parts.append(tag("label", box, tag("i", class_="swatch", style=colour), name))
    return tag("div", *parts, class_="controls")


def _missing(histories: list[History], where: str) -> Html:
    """Returns the message for a page that cannot load plotly.js; page.js shows it."""
    folders = " ".join(str(history.folder) for history in histories)
    text = (
        f"No curves: {where} was not loaded. Copy it into this page's folder, or write the page"
        " again with "
    )
    command = tag("code", f"{program('report')} {folders} --plotly inline")
    return tag("p", text, command, id="missing", hidden="", class_="gap")


def _plot(number: int, figure: curves.Figure) -> Html:
    log = figure.plot["layout"]["yaxis"]["type"] == "log"
    title = (tag("b", figure.panel.title), tag("span", figure.panel.unit, class_="unit"))
    button = tag("button", "log", data_log=number, aria_pressed=str(log).lower())
    wide = "wide" if figure.panel.title == "Loss" else ""
    plot = tag("div", class_="plot", data_figure=number)
    return tag("figure", tag("figcaption", *title, button), plot, class_=wide)


def _section(section: Section) -> Html:
    return joined([tag("h2", section.title), *map(_part, section.parts)])


def _part(part: Table | Text) -> Html:
    if isinstance(part, Text):
        if part.folded:
            return tag("details", tag("summary", part.title), tag("pre", part.body))
        return joined([tag("h3", part.title), tag("pre", part.body)])
    parts = [tag("h3", part.title)] if part.title else []
    if part.rows:
        rows = [tag("tr", *(tag("th", cell) for cell in part.head))] if any(part.head) else []
        for row in part.rows:
            cells = [tag("td", c, class_="long" if len(c) > LONG else "") for c in row]
            rows.append(tag("tr", *cells))
        parts.append(tag("div", tag("table", *rows), class_="scroll"))
    if part.note:
        parts.append(tag("p", part.note, class_="soft"))
    return joined(parts)
