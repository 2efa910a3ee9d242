"""The report as one HTML file: style, data and the script that draws are in it; plotly_js.py says where plotly.js is.

Texts that come from a run (samples, names, messages) are escaped by `tag` and `joined`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...project import program
from ...table import Table
from ..diagnosis.finding import Cause, Finding
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
    """Returns an element; an underscore in an attribute's name becomes a hyphen, one at its end is dropped."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(v))}"' for key, v in attributes.items())
    return Html(f"<{name}{given}>{joined(inner)}</{name}>")


def joined(parts: Sequence[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def page(histories: list[History], names: list[str], findings: list[list[Finding]], link: str = "") -> str:
    """Returns the file's content: the report of one run, or the comparison of several.

    Args:
        histories: Of the runs.
        names: Of the runs.
        findings: Of each run.
        link: The address of plotly.js. Empty: the page contains it.
    """
    one = len(histories) == 1
    title = names[0] if one else f"{len(histories)} runs compared"
    drawn = curves.figures(histories, names)
    body = [tag("h1", title), *([tag("p", what(histories[0]), class_="soft")] if one else []), tag("h2", "Verdict")]
    for history, name, found in zip(histories, names, findings, strict=True):
        body.append(_verdict(history, found, "" if one else name))
    if one:
        body += [_key_figures(histories[0]), _continue(histories[0]), _curves(histories, names, *drawn, link)]
        body += map(_section, of_one(histories[0]))
    else:
        body += [*map(_section, of_several(histories, names)), _curves(histories, names, *drawn, link)]
    data = {"figures": [figure.plot for part in drawn for figure in part], "axes": curves.axes(histories)}
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
    """The findings of one run, or of one of several: then with its name, and folded."""
    heading = [tag("h3", name)] if name else []
    if not findings:
        said = (tag("b", "No findings", class_="level"), f": no rule found a problem. The run {status(history)}.")
        return joined([*heading, tag("div", *said, class_=f"finding {'error' if history.crashes else 'good'}")])
    count = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning", "info")}
    counted = ", ".join(f"{n} {level}{'s' * (n > 1 and level != 'info')}" for level, n in count.items() if n)
    opened = 0 if name else OPEN
    parts = [_finding(finding, number < opened) for number, finding in enumerate(findings)]
    return joined([*heading, tag("p", f"{counted}. The run {status(history)}."), *parts])


def _finding(finding: Finding, opened: bool) -> Html:
    title = (tag("span", finding.level, class_="level"), " ", tag("b", finding.title), " ")
    summary = tag("summary", *title, tag("span", finding.where, class_="soft"))
    causes = [tag("ol", *map(_cause, finding.causes))] if finding.causes else []
    attributes = {"open": ""} if opened else {}
    return tag("details", summary, tag("p", finding.evidence), *causes, class_=f"finding {finding.level}", **attributes)


def _cause(cause: Cause) -> Html:
    changes = [tag("div", tag("code", c.flag), " ", tag("span", c.remark, class_="soft")) for c in cause.changes]
    return tag("li", cause.sentence, *changes)


def _key_figures(history: History) -> Html:
    return tag("dl", *(tag("div", tag("dt", n), tag("dd", value)) for n, value in figures(history)), class_="figures")


def _continue(history: History) -> Html:
    sentence, command = resume(history)
    parts = (tag("h2", "Continue"), tag("p", f"{sentence}:"), tag("pre", command, class_="command"))
    return joined(parts if command else [])


def _curves(
    histories: list[History], names: list[str], shown: list[curves.Figure], more: list[curves.Figure], link: str
) -> Html:
    parts = [tag("h2", "Curves")]
    if not shown and not more:
        return joined([*parts, tag("p", "No metric was written.")])
    known = curves.axes(histories)
    axes = [axis for axis in ("steps", "tokens", "hours") if all(axis in each for each in known)]
    buttons = [tag("button", axis, data_axis=axis, aria_pressed=str(axis == "steps").lower()) for axis in axes]
    runs = [_run(number, name) for number, name in enumerate(names) if len(names) > 1]
    parts.append(tag("div", *buttons, *runs, class_="controls"))
    for history, name in zip(histories, names, strict=True):
        prefix = f"{name}: " if len(names) > 1 else ""
        parts += [tag("p", prefix + sentence, class_="gap") for sentence in curves.not_finite(history)]
    command = f"{program('report')} {' '.join(str(history.folder) for history in histories)} --plotly inline"
    where = link or "the page's plotly.js"
    missing = f"No curves: {where} was not loaded. Copy it into this page's folder, or write the page again with "
    parts.append(tag("p", missing, tag("code", command), id="missing", hidden="", class_="gap"))
    plots = [_plot(number, figure) for number, figure in enumerate([*shown, *more])]
    parts += [tag("noscript", "Curves need JavaScript."), tag("div", *plots[: len(shown)], class_="plots")]
    if more:
        summary = tag("summary", f"{len(more)} more metric{'s' * (len(more) > 1)}")
        parts.append(tag("details", summary, tag("div", *plots[len(shown) :], class_="plots")))
    return joined(parts)


def _run(number: int, name: str) -> Html:
    box = Html(f'<input type="checkbox" checked data-run="{number}"> ')
    return tag("label", box, tag("i", class_="swatch", style=f"background: var(--c{number % curves.COLOURS})"), name)


def _plot(number: int, figure: curves.Figure) -> Html:
    log = figure.plot["layout"]["yaxis"]["type"] == "log"
    title = (tag("b", figure.panel.title), tag("span", figure.panel.unit, class_="unit"))
    button = tag("button", "log", data_log=number, aria_pressed=str(log).lower())
    wide = "wide" if figure.panel.title == "Loss" else ""
    return tag("figure", tag("figcaption", *title, button), tag("div", class_="plot", data_figure=number), class_=wide)


def _section(section: Section) -> Html:
    return joined([tag("h2", section.title), *map(_part, section.parts)])


def _part(part: Table | Text) -> Html:
    if isinstance(part, Text):
        if part.folded:
            return tag("details", tag("summary", part.title), tag("pre", part.body))
        return joined([tag("h3", part.title), tag("pre", part.body)])
    heading = [tag("h3", part.title)] if part.title else []
    head = [tag("tr", *(tag("th", cell) for cell in part.head))] if any(part.head) else []
    rows = [
        tag("tr", *(tag("td", cell, class_="long" if len(cell) > LONG else "") for cell in row)) for row in part.rows
    ]
    table = [tag("div", tag("table", *head, *rows), class_="scroll")] if rows else []
    return joined([*heading, *table, *([tag("p", part.note, class_="soft")] if part.note else [])])
