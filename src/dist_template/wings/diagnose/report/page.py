"""Writes report.html about one run or several.

1  The runs are read, and the rules of diagnosis run over each (`write`).
2  plotly.js is put where the page finds it: in the page, beside it, or on plotly's server (`link`).
3  page.html, a Jinja template, gets findings, curves and tables, and escapes all texts of a run,
   such as names and messages (`page`). plotly draws the curves; plain.py does without it."""

import os
from pathlib import Path

from ....errors import require, with_codes
from ....project import program
from ....records import write_atomically
from ...history import History, read_run
from ..engine import diagnose
from ..expected import progress
from ..finding import Finding, counted
from .curves import Trace, figures
from .plain import svg
from .tables import tables

HTML = "report.html"
FOLDER = Path(__file__).parent
LINE = "rgba(128,128,128,0.25)"
AXIS = {"gridcolor": LINE, "zerolinecolor": LINE, "automargin": True}
SCALE = {
    "label": "log",
    "method": "relayout",
    "args": [{"yaxis.type": "log"}],
    "args2": [{"yaxis.type": "linear"}],
}
LAYOUT = {
    "font": {"size": 12, "color": "#7d868f"},  # can be read on the light page and the dark one
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 44, "r": 12, "t": 34, "b": 36},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    "hovermode": "x unified",
    "updatemenus": [
        {
            "type": "buttons",
            "showactive": False,
            "x": 1,
            "xanchor": "right",
            "y": 0,  # below the axis: the names are above the curves
            "yanchor": "top",
            "pad": {"t": 18, "r": -8},
            "buttons": [SCALE],
        }
    ],
    "xaxis": {**AXIS, "title": {"text": "optimizer step"}},
    "yaxis": AXIS,
}


def write(
    folders: list[Path], output: Path, plotly: str | None = None
) -> tuple[list[History], list[list[Finding]]]:
    """Writes a report on the runs in `folders` into `output`, which is created if it does not
    exist, and returns the histories and findings. `plotly`: where the page loads plotly.js from;
    None: `run.plotly` of the first run. Raises InputError if one of `folders` is not the folder of
    a run, or plotly is not installed."""
    require("plotly", "the report", extra="report")
    histories = [read_run(folder.absolute()) for folder in folders]
    findings = list(map(diagnose, histories))
    output.mkdir(parents=True, exist_ok=True)
    address = link(plotly or histories[0].key("run.plotly", "shared"), histories[0], output)
    write_atomically(output / HTML, page(histories, findings, address))
    return histories, findings


def names_of(histories: list[History]) -> list[str]:
    """Returns <run.name>/<id> of each run, or the full paths if two are equal."""
    names = [history.name for history in histories]
    if len(set(names)) < len(names):
        return [str(history.folder) for history in histories]
    return names


def link(where: str, history: History, output: Path) -> str:
    """Returns the address of plotly.js (4.8 MB) for a page in `output`; "" if the page contains it.
    The shared file is in `run.root`, which can be copied with the pages; it is written once.
    Outside it is next to the page."""
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    if where == "inline":
        return ""
    name = f"plotly-{get_plotlyjs_version()}.min.js"
    if where == "cdn":
        return f"https://cdn.plot.ly/{name}"
    output = output.absolute()
    folder = output
    # A run names its root: it is used only if this run is in it, at the place that it names.
    root_name = Path(str(history.key("run.root", ""))).name
    run_name = str(history.key("run.name", ""))
    for parent in output.parents:
        if root_name and parent.name == root_name:
            if parent / run_name / history.folder.name == history.folder.absolute():
                folder = parent
            break
    if not (folder / name).exists():
        write_atomically(folder / name, get_plotlyjs())
    return Path(os.path.relpath(folder / name, output)).as_posix()


def page(histories: list[History], findings: list[list[Finding]], link: str = "") -> str:
    """Returns the content of report.html; an empty `link` puts plotly.js into the page."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    names = names_of(histories)
    runs = []
    for history, name, found in zip(histories, names, findings, strict=True):
        run = {"name": name, "progress": progress(history)}
        runs.append({**run, "counted": counted(found), "findings": found})
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs compared"
    css = (FOLDER / "page.css").read_text("utf-8")
    library = "" if link else get_plotlyjs()
    loader = FileSystemLoader(FOLDER)
    environment = Environment(loader=loader, autoescape=True, finalize=_without_controls)
    return environment.get_template("page.html").render(
        title=title,
        css=Markup(css),
        link=link,
        inline=f"{program('report')} RUN --plotly inline",
        library=Markup(library),
        runs=runs,
        figures=figures(histories, names),
        drawn=_drawn,
        tables=tables(histories, names),
    )


def _without_controls(value: object) -> object:
    """Returns a run's text with control characters as codes: marks that reverse the direction of
    text would make a page show another name or command than it has."""
    is_ours = hasattr(value, "__html__")  # style sheet, script and figures
    if isinstance(value, str) and not is_ours:
        return with_codes(value)
    return value


def _drawn(traces: list[Trace], number: int) -> str:
    """Returns a figure's HTML, which plotly draws in the colours of the page."""
    from markupsafe import Markup
    from plotly.io import to_html

    figure = {"data": traces, "layout": {**LAYOUT, "showlegend": len(traces) > 1}}
    config = {"displayModeBar": False, "responsive": True}
    options = {"include_plotlyjs": False, "full_html": False, "validate": False}
    return Markup(svg(traces) + to_html(figure, config=config, div_id=f"plot-{number}", **options))
