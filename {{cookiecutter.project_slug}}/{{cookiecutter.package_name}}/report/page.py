"""The report as one HTML file that needs nothing else: plotly.js, style and data stand in it.

Whatever comes from a run (texts, names, messages) is escaped; and the page's own policy lets no script run but the two
that stand in it, by their hashes, and nothing be fetched from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from ..diagnosis.finding import Finding
from ..history import goodput
from ..history.run import History
from . import curves
from .commands import resume
from .results import clock, figures
from .sections import Section, Text, of_one, of_several, status
from .tables import Table

OPEN = 3  # findings that are open from the start
COLOURS = {"productive": 2, "start": 5, "restart": 4, "checkpoint": 3, "data_wait": 6, "validation": 0, "lost": 1}


def page(histories: list[History], names: list[str], findings: list[list[Finding]]) -> str:
    """The whole file; with one history a run's report, with several their comparison."""
    one = len(histories) == 1
    title = names[0] if one else f"{len(histories)} runs compared"
    shown, more = curves.figures(histories, names)
    parts = [f"<header><h1>{escape(title)}</h1>", f"<p class=soft>{escape(_what(histories[0]))}</p>" * one, "</header>"]
    parts.append("<h2>Verdict</h2>")
    parts += [_verdict(*each, name * (not one)) for *each, name in zip(histories, findings, names, strict=True)]
    parts += [_key_figures(histories[0]), _resume(histories[0])] if one else []
    parts += [_section(part) for part in ([] if one else of_several(histories, names))]
    parts += [_curves(histories, names, shown, more), _goodput(histories, names)]
    parts += [_section(part) for part in (of_one(histories[0]) if one else [])]
    data = {"figures": [figure.plot for figure in (*shown, *more)], "axes": curves.axes(histories)}
    scripts = [resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8"), _own("page.js")]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src " + " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_own('page.css')}</style></head><body>",
            *filter(None, parts),
            f'<script type="application/json" id="curves">{_in_script(data)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _own(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _in_script(data: object) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _what(history: History) -> str:
    """What was trained on what, as far as it is known."""
    total = history.fact("parameters.total")
    known = [
        history.fact("model.model_type") or history.key("model.architecture.model_type"),
        f"{total / 1e6:,.1f} M parameters" if total else None,
        history.fact("training.strategy"),
        f"{n} × {history.fact('machine.device')}" if (n := history.fact("machine.world_size")) else None,
        history.fact("training.precision"),
        history.environment.get("time"),
    ]
    return ", ".join(str(each) for each in known if each)


def _verdict(history: History, findings: Sequence[Finding], name: str) -> str:
    """Of several runs each has its name before it, and its findings folded."""
    count = {level: sum(f.level == level for f in findings) for level in ("error", "warning", "info")}
    told = ", ".join(f"{n} {level}{'s' * (n > 1 and level != 'info')}" for level, n in count.items() if n)
    heading = f"<h3>{escape(name)}</h3>" if name else ""
    stands = escape(status(history))
    if not findings:
        return f"{heading}<div class='finding good'><b class=level>No findings</b>: no rule saw anything wrong. It {stands}.</div>"
    opened = OPEN if not name else 0
    parts = [_finding(each, number < opened) for number, each in enumerate(findings)]
    return f"{heading}<p>{told}. It {stands}.</p>" + "".join(parts)


def _finding(finding: Finding, opened: bool) -> str:
    causes = "".join(
        f"<li>{escape(cause.sentence)}"
        + "".join(
            f"<br><code>{escape(change.flag)}</code> <span class=soft>{escape(change.remark)}</span>" for change in cause.changes
        )
        + "</li>"
        for cause in finding.causes
    )
    return (
        f"<details class='finding {escape(finding.level)}'{' open' * opened}><summary><span class=level>{escape(finding.level)}</span> "
        f"<b>{escape(finding.title)}</b> <span class=soft>{escape(finding.where)}</span></summary>"
        f"<p>{escape(finding.evidence)}</p>" + f"<ol>{causes}</ol>" * bool(causes) + "</details>"
    )


def _key_figures(history: History) -> str:
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures(history))
    return f"<dl class=figures>{tiles}</dl>"


def _resume(history: History) -> str:
    what, command = resume(history)
    return f"<h2>Go on</h2><p>{escape(what)}:</p><pre class=command>{escape(command)}</pre>" if command else ""


def _curves(histories: list[History], names: list[str], shown: list[curves.Figure], more: list[curves.Figure]) -> str:
    if not shown and not more:
        return "<h2>Curves</h2><p>No metric was written down yet.</p>"
    axes = "".join(
        f"<button data-axis={axis} aria-pressed={'true' if axis == 'steps' else 'false'}>{axis}</button>"
        for axis in ("steps", "tokens", "hours")
        if all(axis in known for known in curves.axes(histories))
    )
    runs = "".join(
        f"<label><input type=checkbox checked data-run={run}> <i class=swatch style='background:var(--c{run % 7})'></i>{escape(name)}</label>"
        for run, name in enumerate(names)
        if len(names) > 1
    )
    gaps = "".join(
        f"<p class=gap>{escape(f'{name}: ' * (len(names) > 1) + sentence)}</p>"
        for history, name in zip(histories, names, strict=True)
        for sentence in curves.not_finite(history)
    )
    plots = [_plot(number, figure, len(histories) == 1) for number, figure in enumerate((*shown, *more))]
    folded = f"<details><summary>{len(more)} more metric{'s' * (len(more) > 1)}</summary><div class=plots>{''.join(plots[len(shown) :])}</div></details>"
    return (
        f"<h2>Curves</h2><div class=controls><span>{axes}</span>{runs}</div>{gaps}<noscript><p>Curves need JavaScript.</p></noscript>"
        f"<div class=plots>{''.join(plots[: len(shown)])}</div>" + folded * bool(more)
    )


def _plot(number: int, figure: curves.Figure, one: bool) -> str:
    dashes = {"solid": "", "dot": "2 3", "dash": "6 4", "dashdot": "7 3 2 3"}
    lines = dict.fromkeys((name, colour if one else None, dash) for name, colour, dash in figure.lines)
    keys = "".join(
        f"<span class=key><svg viewBox='0 0 22 8'{f' style=color:var(--c{colour})' if colour is not None else ''}>"
        f"<line x1=0 y1=4 x2=22 y2=4 stroke-dasharray='{dashes[dash]}' /></svg>{escape(name)}</span>"
        for name, colour, dash in lines
        if len(lines) > 1 or name != figure.panel.title
    )
    log = figure.plot["layout"]["yaxis"]["type"] == "log"
    button = f"<button data-log={number} aria-pressed={'true' if log else 'false'}>log</button>"
    wide = " class=wide" if figure.panel.title == "Loss" else ""
    return (
        f"<figure{wide}><figcaption><b>{escape(figure.panel.title)}</b><span class=unit>{escape(figure.panel.unit)}</span>"
        f"{keys}{button}</figcaption><div class=plot data-figure={number}></div></figure>"
    )


def _goodput(histories: list[History], names: list[str]) -> str:
    bars = [_bar(h.goodput, name * (len(names) > 1)) for h, name in zip(histories, names, strict=True) if h.goodput]
    return "<h2>Where the time went</h2>" + "".join(bars) if bars else ""


def _bar(seconds: dict[str, float], name: str) -> str:
    whole = max(sum(seconds.values()), 1e-9)
    kinds = [(kind.replace("_", " "), s, s / whole, COLOURS[kind]) for kind, s in seconds.items() if s > 0]
    segments = "".join(f"<i style='width:{share:.3%};background:var(--c{c})' title='{kind}'></i>" for kind, _, share, c in kinds)
    told = "".join(
        f"<li><i style='background:var(--c{c})'></i>{kind} {share:.1%} <span class=soft>{clock(s)}</span></li>"
        for kind, s, share, c in kinds
    )
    heading = f"<h3>{escape(name)}</h3>" if name else ""
    return f"{heading}<div class=bar role=img aria-label='{escape(goodput.describe(seconds))}'>{segments}</div><ul class=kinds>{told}</ul>"


def _section(section: Section) -> str:
    return f"<h2>{escape(section.title)}</h2>" + "".join(map(_part, section.parts))


def _part(part: Table | Text) -> str:
    if isinstance(part, Text):
        body = f"<pre>{escape(part.body)}</pre>"
        if part.folded:
            return f"<details><summary>{escape(part.title)}</summary>{body}</details>"
        return f"<h3>{escape(part.title)}</h3>{body}"
    heading = f"<h3>{escape(part.title)}</h3>" if part.title else ""
    head = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in part.head) + "</tr>" if any(part.head) else ""
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in part.rows)
    note = f"<p class=soft>{escape(part.note)}</p>" if part.note else ""
    return f"{heading}<div class=scroll><table>{head}{rows}</table></div>{note}" if rows else heading + note
