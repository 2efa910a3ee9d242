"""Provides plotly.js (4.8 MB) to a report page: as a shared file, in the page, or by a CDN."""

from __future__ import annotations

import os
from pathlib import Path

from ....observe.history.run import History, PlotlyJs
from ....records import write_atomically


def link(where: PlotlyJs, history: History, output: Path) -> str:
    """Returns the address of plotly.js for a page in `output`; empty if the page contains it.

    The shared file is in `run.root`, which can be copied with the pages; it is written once.
    """
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    name = f"plotly-{get_plotlyjs_version()}.min.js"
    if where == "inline":
        return ""
    if where == "cdn":
        return f"https://cdn.plot.ly/{name}"
    output, root = output.absolute(), _root(history)
    path = (root if root in (output, *output.parents) else output) / name
    if not path.exists():
        write_atomically(path, get_plotlyjs())
    return Path(os.path.relpath(path, output)).as_posix()


def _root(history: History) -> Path:
    """Returns `run.root` where it is now; of a run's folder that was copied alone, the folder."""
    name, root = str(history.key("run.name", "")), Path(str(history.key("run.root", "")))
    found = history.folder.parents[len(Path(name).parts)]
    is_root = found / name == history.folder.parent and found.name == root.name
    return found if is_root else history.folder
