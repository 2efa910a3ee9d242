"""The report as one HTML file: style, data and the script that draws are in it, plotly.js where plotly_js.py puts it.

Whatever comes from a run (texts, names, messages) is escaped; and the page's own policy permits no script but these two
(one in the page by its hash, one in another file by a nonce), and no request but for plotly.js.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...project import program
from ..diagnosis.finding import Cause, Finding
from ..history import goodput
from ..history.run import History
from . import curves
from .commands import resume
from .results import clock, figures
from .sections import Section, Text, of_one, of_several, status, what
from .tables import Table

LONG = 40  # characters of a cell that may be broken into lines
OPEN = 3  # findings that are open from the start
COLOURS = {"productive": 2, "start": 5, "restart": 4, "checkpoint": 3, "data_wait": 6, "validation": 0, "lost": 1}
DASHES = {"solid": "", "dot": "2 3", "dash": "6 4", "dashdot": "7 3 2 3"}


class Html(str):
    """HTML already; any other text is escaped where it is put into an element."""


def tag(name: str, *inner: str, **attributes: Any) -> Html:
    """An element; an underscore in an attribute's name is a hyphen, one at its end nothing."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(v))}"' for key, v in attributes.items())
    return Html(f"<{name}{given}>{joined(inner)}</{name}>")


def joined(parts: Sequence[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def page(histories: list[History], names: list[str], findings: list[list[Finding]], link: str = "") -> str:
    """The content of the file; with one history a run's report, with several their comparison.

    Args:
        histories: Of the runs.
        names: Of the runs.
        findings: Of each run.
        link: The address of plotly.js. Empty: it is in the page.
    """
    one = len(histories) == 1
    title = names[0] if one else f"{len(histories)} runs compared"
    told = zip(histories, findings, names, strict=True)
    drawn = curves.figures(histories, names)
    body = [tag("header", tag("h1", title), *([tag("p", what(histories[0]), class_="soft")] if one else []))]
    body += [tag("h2", "Verdict"), *(_verdict(history, found, "" if one else name) for history, found, name in told)]
    body += [_key_figures(histories[0]), _go_on(histories[0])] if one else []
    body += [_section(part) for part in ([] if one else of_several(histories, names))]
    body += [_curves(histories, names, *drawn, link), _goodput(histories, names)]
    body += [_section(part) for part in (of_one(histories[0]) if one else [])]
    data = {"figures": [figure.plot for part in drawn for figure in part], "axes": curves.axes(histories)}
    return _document(title, joined(body), json.dumps(data, separators=(",", ":")), link)


def _document(title: str, body: Html, data: str, link: str = "") -> str:
    """Of JSON, "<" is written otherwise, so that nothing in it can end its element."""
    from plotly.offline import get_plotlyjs

    scripts = [_own("page.js")] if link else [get_plotlyjs(), _own("page.js")]
    sources = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    library = ""
    if link:
        nonce = _hash(body + data)  # the texts of a run cannot contain their own hash
        sources += f" 'nonce-{nonce}'"
        checked = {"integrity": f"sha256-{_hash(get_plotlyjs())}", "crossorigin": "anonymous"}
        library = tag("script", nonce=nonce, src=link, **(checked if link.startswith("https:") else {}))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {sources}"
    head = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_own("page.css")}</style></head>
"""
    code = library + "\n".join(f"<script>{script}</script>" for script in scripts)
    data = data.replace("<", "\\u003c")
    return f'{head}<body>{body}\n<script type="application/json" id="curves">{data}</script>\n{code}</body></html>\n'


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _own(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


# ---- what is found ---------------------------------------------------------------------------------------------------


def _verdict(history: History, findings: Sequence[Finding], name: str) -> Html:
    """Of several runs each has its name before it, and its findings folded."""
    heading = [tag("h3", name)] if name else []
    if not findings:
        said = (tag("b", "No findings", class_="level"), f": no rule saw anything wrong. It {status(history)}.")
        return joined([*heading, tag("div", *said, class_=f"finding {'error' if history.crashes else 'good'}")])
    count = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning", "info")}
    told = ", ".join(f"{n} {level}{'s' * (n > 1 and level != 'info')}" for level, n in count.items() if n)
    opened = 0 if name else OPEN
    parts = [_finding(finding, number < opened) for number, finding in enumerate(findings)]
    return joined([*heading, tag("p", f"{told}. It {status(history)}."), *parts])


def _finding(finding: Finding, opened: bool) -> Html:
    title = (tag("span", finding.level, class_="level"), " ", tag("b", finding.title), " ")
    summary = tag("summary", *title, tag("span", finding.where, class_="soft"))
    causes = [tag("ol", *map(_cause, finding.causes))] if finding.causes else []
    shown = {"open": ""} if opened else {}
    return tag("details", summary, tag("p", finding.evidence), *causes, class_=f"finding {finding.level}", **shown)


def _cause(cause: Cause) -> Html:
    changes = [tag("div", tag("code", c.flag), " ", tag("span", c.remark, class_="soft")) for c in cause.changes]
    return tag("li", cause.sentence, *changes)


def _key_figures(history: History) -> Html:
    return tag("dl", *(tag("div", tag("dt", n), tag("dd", value)) for n, value in figures(history)), class_="figures")


def _go_on(history: History) -> Html:
    sentence, command = resume(history)
    parts = (tag("h2", "Go on"), tag("p", f"{sentence}:"), tag("pre", command, class_="command"))
    return joined(parts if command else [])


# ---- curves ----------------------------------------------------------------------------------------------------------


def _curves(
    histories: list[History], names: list[str], shown: list[curves.Figure], more: list[curves.Figure], link: str
) -> Html:
    if not shown and not more:
        return joined([tag("h2", "Curves"), tag("p", "No metric has been written down.")])
    known = curves.axes(histories)
    axes = [axis for axis in ("steps", "tokens", "hours") if all(axis in each for each in known)]
    buttons = [tag("button", axis, data_axis=axis, aria_pressed=_truth(axis == "steps")) for axis in axes]
    runs = [_run(number, name) for number, name in enumerate(names) if len(names) > 1]
    gaps = [
        tag("p", f"{name}: " * (len(names) > 1) + sentence, class_="gap")
        for history, name in zip(histories, names, strict=True)
        for sentence in curves.not_finite(history)
    ]
    plots = [_plot(number, figure, len(names) == 1) for number, figure in enumerate([*shown, *more])]
    parts = [tag("h2", "Curves"), tag("div", *buttons, *runs, class_="controls"), *gaps]
    verb = f"{program('report')} {' '.join(str(history.folder) for history in histories)}"
    missing = (f"No curves: {link} cannot be loaded. Copy it into this page's folder, or write the page again with ",)
    missing += (tag("code", f"{verb} --plotly inline"),)
    parts += [tag("p", *missing, id="missing", hidden="", class_="gap")] if link else []
    parts += [tag("noscript", "Curves need JavaScript."), tag("div", *plots[: len(shown)], class_="plots")]
    if more:
        summary = tag("summary", f"{len(more)} more metric{'s' * (len(more) > 1)}")
        parts.append(tag("details", summary, tag("div", *plots[len(shown) :], class_="plots")))
    return joined(parts)


def _run(number: int, name: str) -> Html:
    box = Html(f'<input type="checkbox" checked data-run="{number}"> ')
    return tag("label", box, tag("i", class_="swatch", style=f"background: var(--c{number % 7})"), name)


def _plot(number: int, figure: curves.Figure, one: bool) -> Html:
    """Of one run the colours tell metrics apart; of several they are runs, and the dashes are metrics."""
    lines = dict.fromkeys((name, colour if one else None, dash) for name, colour, dash in figure.lines)
    keys = [_key(*line) for line in lines if len(lines) > 1 or line[0] != figure.panel.title]
    log = figure.plot["layout"]["yaxis"]["type"] == "log"
    title = (tag("b", figure.panel.title), tag("span", figure.panel.unit, class_="unit"))
    button = tag("button", "log", data_log=number, aria_pressed=_truth(log))
    wide = "wide" if figure.panel.title == "Loss" else ""
    return tag(
        "figure", tag("figcaption", *title, *keys, button), tag("div", class_="plot", data_figure=number), class_=wide
    )


def _key(name: str, colour: int | None, dash: str) -> Html:
    stroke = tag("line", x1=0, y1=4, x2=22, y2=4, stroke_dasharray=DASHES[dash])
    style = f"color: var(--c{colour})" if colour is not None else ""
    return tag("span", tag("svg", stroke, viewBox="0 0 22 8", style=style), name, class_="key")


def _truth(value: bool) -> str:
    return "true" if value else "false"


# ---- time, tables, texts ---------------------------------------------------------------------------------------------


def _goodput(histories: list[History], names: list[str]) -> Html:
    bars = [
        _bar(history.goodput, name * (len(names) > 1))
        for history, name in zip(histories, names, strict=True)
        if history.goodput
    ]
    return joined([tag("h2", "Where the time went"), *bars] if bars else [])


def _bar(seconds: dict[str, float], name: str) -> Html:
    whole = max(sum(seconds.values()), 1e-9)
    colour = {kind: f"background: var(--c{COLOURS[kind]})" for kind in seconds}
    kinds = [(kind, s) for kind, s in seconds.items() if s > 0]
    segments = [tag("i", style=f"width: {s / whole:.3%}; {colour[kind]}") for kind, s in kinds]
    told = [
        tag("li", tag("i", style=colour[kind]), f"{kind.replace('_', ' ')} {s / whole:.1%} ", _soft(clock(s)))
        for kind, s in kinds
    ]
    bar = tag("div", *segments, class_="bar", role="img", aria_label=goodput.describe(seconds))
    return joined([*([tag("h3", name)] if name else []), bar, tag("ul", *told, class_="kinds")])


def _soft(text: str) -> Html:
    return tag("span", text, class_="soft")


def _section(section: Section) -> Html:
    return joined([tag("h2", section.title), *map(_part, section.parts)])


def _cell(text: str) -> Html:
    return tag("td", text, class_="long" if len(text) > LONG else "")


def _part(part: Table | Text) -> Html:
    if isinstance(part, Text):
        if part.folded:
            return tag("details", tag("summary", part.title), tag("pre", part.body))
        return joined([tag("h3", part.title), tag("pre", part.body)])
    heading = [tag("h3", part.title)] if part.title else []
    head = [tag("tr", *(tag("th", cell) for cell in part.head))] if any(part.head) else []
    rows = [tag("tr", *map(_cell, row)) for row in part.rows]
    table = [tag("div", tag("table", *head, *rows), class_="scroll")] if rows else []
    return joined([*heading, *table, *([tag("p", part.note, class_="soft")] if part.note else [])])
