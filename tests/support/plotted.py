"""The figures of a page of HTML, as plotly gets them."""

from __future__ import annotations

import json
import re
from typing import Any


def plotted(page: str) -> list[dict[str, Any]]:
    """Data and layout of each figure, which must be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    decoder, found = json.JSONDecoder(parse_constant=refuse), []
    for given in re.finditer(r'Plotly\.newPlot\(\s*"plot-\d+",\s*', page):
        data, end = decoder.raw_decode(page, given.end())
        layout, _ = decoder.raw_decode(page, page.index("{", end))
        found.append({"data": data, "layout": layout})
    return found
