"""Keys of `run` for the report that `fit` writes at its end: see hooks.py."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class ReportKeys:
    """The report of a run.

    Args:
        report: Write report.html at the end of `fit`. false leaves it to the verb `report`.
        plotly: Where report.html loads plotly.js (5 MB) from. shared: one file in `root` for all
            runs; inline: the page contains it; cdn: plotly's CDN, which needs a network."""

    report: bool = True
    plotly: Literal["shared", "inline", "cdn"] = "shared"
