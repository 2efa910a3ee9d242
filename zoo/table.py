"""The library's table of what cases.py found: src/dist_template/proof.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from dist_template.model import proof

from .arms import ARMS

# What says nothing of a type: a refusal of a small model's number of blocks, and rounding that
# Adam's division amplifies, where all of the first step but the update agrees. `fit` calls these
# cases unproven.
NOT_OF_A_TYPE = ("cannot be divided into", "first step agree, the update differs")


def table(cases: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the library's table (model/proof.py): a fault is a reason to refuse."""
    models: dict[str, Any] = {}
    for case in sorted(cases, key=lambda each: (each["type"], each["variant"])):
        entry = models.setdefault(case["type"], {})
        if case["verdict"] == "not run":
            entry["not_run"] = case["why"]
        elif case["arm"] == "one":
            entry.setdefault("leaks", {}).update(case["leaks"])
        if case["arm"] == "one":
            continue
        variants = entry.setdefault("variants", [])
        if not variants or variants[-1]["switches"] != case["switches"]:
            variants.append({"switches": case["switches"], "right": [], "refused": {}})
        axes = ARMS[case["arm"]].axes
        if case["verdict"] == "right":
            variants[-1]["right"].append(axes)
        elif not any(each in case["why"] for each in NOT_OF_A_TYPE):
            variants[-1]["refused"][axes] = re.sub(r"^rank \d+: (refused: )?", "", case["why"])
    tried = {
        kind: entry for kind, entry in models.items() if entry.keys() & {"variants", "not_run"}
    }
    return {"versions": proof.versions(), "models": tried}


def text(found: dict[str, Any]) -> str:
    """Returns the table as JSON, with a line for each type."""
    lines = [
        f"{json.dumps(kind)}: {json.dumps(entry, sort_keys=True)}"
        for kind, entry in found["models"].items()
    ]
    return (
        f'{{"versions": {json.dumps(found["versions"])}, "models": {{\n'
        + ",\n".join(lines)
        + "\n}}\n"
    )


def without_table() -> None:
    """In each rank: what an earlier run has refused is tried again."""
    proof._table = lambda: {"versions": proof.versions(), "models": {}}
