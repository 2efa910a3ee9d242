"""The library's table of what cases.py found: src/dist_template/proof.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from dist_template.model import proof

from .arms import ARMS

NAME = "variant"  # key of a variant in a table that is not merged yet: default or switched
# What says nothing of a type: a refusal of a small model's number of blocks, and rounding that
# Adam's division amplifies, where all of the first step but the update agrees. `fit` calls these
# cases unproven.
NOT_OF_A_TYPE = ("cannot be divided into", "first step agree, the update differs")


def table(cases: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the library's table (model/proof.py), to be merged: a fault is a reason to refuse."""
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
            new = {"switches": case["switches"], "right": [], "refused": {}}
            variants.append(new | {NAME: case["variant"]})
        axes = ARMS[case["arm"]].axes
        if case["verdict"] == "right":
            variants[-1]["right"].append(axes)
        elif not any(each in case["why"] for each in NOT_OF_A_TYPE):
            variants[-1]["refused"][axes] = re.sub(r"^rank \d+: (refused: )?", "", case["why"])
    tried = {
        kind: entry for kind, entry in models.items() if entry.keys() & {"variants", "not_run"}
    }
    return {"versions": proof.versions(), "models": tried}


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns the types of two tables, with what `found` has tried in place of what `before` has.

    A type's first variant has its defaults, the second its switches the other way round. Verdicts
    of strategies that were not tried again stay where the switches are the same, and so do the
    leaks of a variant that was not tried again."""
    models = dict(before)
    for kind, entry in found.items():
        old = before.get(kind, {})
        variants: list[dict[str, Any]] = [*old.get("variants", [])]
        if len(variants) > len(entry.get("variants", [])):
            entry["leaks"] = old.get("leaks", {}) | entry.get("leaks", {})
        for variant in entry.get("variants", []):
            name, switches = variant.pop(NAME), variant["switches"]
            known = [each for each in variants if each["switches"] == switches]
            if known:
                _replace(known[0], variant)
            elif name == "default":
                variants[:1] = [variant]
            else:
                variants[1:] = [variant]
        models[kind] = old | entry | ({"variants": variants} if variants else {})
    return dict(sorted(models.items()))


def _replace(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Puts the verdicts of `new` in place of those that `old` has of the same strategies."""
    tried = {*new["right"], *new["refused"]}
    old["right"] = [*new["right"], *(each for each in old["right"] if each not in tried)]
    kept = {axes: why for axes, why in old["refused"].items() if axes not in tried}
    old["refused"] = kept | new["refused"]


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
