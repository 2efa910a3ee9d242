"""The newest evaluation of a run: a forest plot of differences, verdicts, worst and best texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....records import read_mapping
from ....table import Table
from .curves import Figure, Panel


def newest(run: Path) -> dict[str, Any]:
    """Returns what wings/ship/evaluate has written last; {} if there is none."""
    files = sorted((run / "evaluation").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return read_mapping(files[-1], "evaluate again, or remove it") if files else {}


def forest(found: dict[str, Any]) -> list[Figure]:
    """Returns a plot of each comparison's difference and interval, in percent of the baseline."""
    rows = [each for each in found.get("comparisons", ()) if each["baseline"]]
    if not rows:
        return []

    def percents(key: str) -> list[float]:
        return [100 * each[key] / abs(each["baseline"]) for each in rows]

    x, y = percents("difference"), [each["name"] for each in rows]
    ends = {"array": zip(percents("high"), x, strict=True)}
    ends["arrayminus"] = zip(x, percents("low"), strict=True)
    error: dict[str, Any] = {key: [a - b for a, b in pairs] for key, pairs in ends.items()}
    trace: dict[str, Any] = {"x": x, "y": y, "mode": "markers", "error_x": error | {"type": "data"}}
    trace |= {"meta": {"run": 0, "colour": 0, "is_fixed": True}, "marker": {"size": 8}}
    layout = {"yaxis": {"type": "category"}, "showlegend": False, "hovermode": "closest"}
    layout["xaxis"] = {"title": {"text": "% of the baseline"}}
    panel = Panel("Differences to the baseline", "with 95 % intervals", ())
    return [Figure(panel, {"data": [trace], "layout": layout})]


def tables(found: dict[str, Any]) -> list[Table]:
    """Returns the verdicts, and the texts in which the run is worst and best."""
    if not found:
        return []
    verdicts = [[each["name"], each["sentence"]] for each in found["comparisons"]]
    rows = [
        [end, each["text"], f"{each['run']:.4f}", f"{each['baseline']:.4f}"]
        for end in ("worst", "best")
        for each in found[end]
    ]
    head = ["", "document", found.get("unit", "bits per byte"), "baseline"]
    documents = Table("Where the run is worst and best", head, rows)
    return [*([Table("", ["", "verdict"], verdicts)] if verdicts else []), documents]
