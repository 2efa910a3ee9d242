"""Writes report.html and report.md about one run or several.

page.html and page.md are Jinja templates of the same variables. page.html escapes all texts of a
run (samples, names, messages); plotly draws the curves.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

from ....errors import require
from ....observe.history.run import History, read_run
from ....project import program
from ....records import write_atomically
from ..engine import diagnose
from ..finding import Finding, counted
from . import curves, sections
from .results import figures, resume

HTML, MARKDOWN = "report.html", "report.md"
FOLDER = Path(__file__).parent
TEXT, LINE = "#7d868f", "rgba(128,128,128,0.25)"  # can be read on the light page and the dark one
LAYOUT = {
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": TEXT},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 44, "r": 12, "t": 34, "b": 36},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    "hovermode": "x unified",
}
AXIS = {"gridcolor": LINE, "zerolinecolor": LINE, "automargin": True}


def write(folders: list[Path], output: Path, plotly: str | None = None) -> tuple[list[History], list[list[Finding]]]:
    """Writes a report on the runs in `folders`, and returns the histories and findings.

    Args:
        folders: Of runs.
        output: The folder of the report; it is created if it does not exist.
        plotly: Where the page loads plotly.js from. None: `run.plotly` of the first run.

    Raises:
        InputError: One of `folders` is not the folder of a run, or plotly is not installed.
    """
    require("plotly", "the report")
    histories = [read_run(folder.absolute()) for folder in folders]
    findings = list(map(diagnose, histories))
    output.mkdir(parents=True, exist_ok=True)
    address = link(plotly or histories[0].key("run.plotly", "shared"), histories[0], output)
    content = context(histories, names_of(histories), findings, address)
    write_atomically(output / HTML, page(content))
    write_atomically(output / MARKDOWN, markdown(content))
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
    """
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    name = f"plotly-{get_plotlyjs_version()}.min.js"
    if where == "inline":
        return ""
    if where == "cdn":
        return f"https://cdn.plot.ly/{name}"
    output, root = output.absolute(), _root(history)
    folder = root if root in (output, *output.parents) else output
    if not (folder / name).exists():
        write_atomically(folder / name, get_plotlyjs())
    return Path(os.path.relpath(folder / name, output)).as_posix()


def _root(history: History) -> Path:
    """Returns `run.root` where it is now; of a run's folder that was copied alone, the folder."""
    name, root = str(history.key("run.name", "")), Path(str(history.key("run.root", "")))
    found = history.folder.parents[len(Path(name).parts)]
    is_root = found / name == history.folder.parent and found.name == root.name
    return found if is_root else history.folder


def context(
    histories: list[History], names: list[str], findings: list[list[Finding]], link: str = ""
) -> dict[str, object]:
    """Returns the variables of the templates; an empty `link` puts plotly.js into the page."""
    shown, more = curves.figures(histories, names)
    one = histories[0]
    runs: list[dict[str, object]] = []
    content = {
        "title": f"{len(histories)} runs compared",
        "sections": sections.of_several(histories, names),
        "link": link,
        "what": sections.what(one),
        "runs": runs,
        "figures": figures(one),
        "resume": resume(one),
        "shown": shown,
        "more": more,
        "command": " ".join([program("report"), *(str(each.folder) for each in histories)]),
    }
    if len(histories) == 1:
        content |= {"title": names[0], "sections": sections.of_one(one)}
        shown += sections.differences_to_baseline(one.folder)
    for history, name, found in zip(histories, names, findings, strict=True):
        runs.append({
            "name": name,
            "findings": found,
            "counted": counted(found),
            "status": sections.status(history),
            "crashed": bool(history.crashes),
            "gaps": curves.not_finite(history),
        })  # fmt: skip
    return content


def page(context: dict[str, object]) -> str:
    """Returns the content of report.html from `context`."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True)
    return environment.get_template("page.html").render(
        context,
        css=Markup((FOLDER / "page.css").read_text("utf-8")),
        library=Markup("" if context["link"] else get_plotlyjs()),
        drawn=_drawn,
    )


def _drawn(figure: curves.Figure, number: int) -> str:
    """Returns a figure's HTML, which plotly draws in the colours and the font of the page."""
    from markupsafe import Markup
    from plotly.io import to_html

    layout = {
        **LAYOUT,
        **figure.layout,
        "xaxis": {**AXIS, **figure.x},
        "yaxis": {**AXIS, **figure.y},
    }
    return Markup(
        to_html(
            {"data": figure.data, "layout": layout},
            config={"displayModeBar": False, "responsive": True},
            include_plotlyjs=False,
            full_html=False,
            validate=False,
            div_id=f"plot-{number}",
        )
    )


def markdown(context: dict[str, object]) -> str:
    """Returns the content of report.md: without curves and folded texts."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(FOLDER), finalize=_inline, trim_blocks=True, lstrip_blocks=True)
    environment.filters["block"] = _block
    return environment.get_template("page.md").render(context)


def _inline(text: object) -> object:
    """Returns the text escaped on one line; blocks remain as they are."""
    if hasattr(text, "__html__"):
        return text
    return " ".join(html.escape(str(text), quote=False).replace("|", "\\|").split())


def _block(text: str) -> object:
    """Returns the text as code, between fences that are longer than any in it."""
    from markupsafe import Markup

    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, 1 + longest)
    return Markup(f"{fence}text\n{text}\n{fence}")
