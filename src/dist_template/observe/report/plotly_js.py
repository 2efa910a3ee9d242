"""Where a page loads plotly.js from: one file that all runs' pages share, the page itself, or plotly's CDN.

plotly.js is 4.8 MB, and the rest of a page some 100 kB. The shared file is in `run.root`. A copy of that folder shows
its curves without a network, and so does a folder with a page and this file in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from ..history.run import History

PlotlyJs = Literal["shared", "inline", "cdn"]


def link(where: PlotlyJs, history: History, output: Path) -> str:
    """The address of plotly.js for a page in `output`; writes the shared file if it is not there. inline: empty."""
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    name = f"plotly-{get_plotlyjs_version()}.min.js"
    if where == "inline":
        return ""
    if where == "cdn":
        return f"https://cdn.plot.ly/{name}"
    output, root = output.absolute(), _root(history)
    path = (root if root in (output, *output.parents) else output) / name
    if not path.exists():
        temporary = path.with_name(f".{name}.{os.getpid()}")
        temporary.write_text(get_plotlyjs(), encoding="utf-8")
        os.replace(temporary, path)
    return Path(os.path.relpath(path, output)).as_posix()


def _root(history: History) -> Path:
    """`run.root` as it is now; a run's folder that was copied out of it is its own root."""
    name, root = str(history.key("run.name", "")), Path(str(history.key("run.root", "")))
    found = history.folder.parents[len(Path(name).parts)]
    return found if found / name == history.folder.parent and found.name == root.name else history.folder
