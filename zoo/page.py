"""docs/models.md: the table of zoo.py for readers, between the page's two marks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
START, END = "<!-- written by python -m zoo -->\n", "<!-- end of what it writes -->\n"
NOT_TRIED = "·"
COMPOSED = "made of several models"
COMBINED = {"fsdp+tp": ("fsdp", "tp"), "fsdp+pp": ("fsdp", "pp"), "fsdp+ep+pp": ("fsdp+ep", "pp")}
DATA_PARALLEL = ("ddp", "fsdp", "zero2", "zero3")
TABLE = """
With {versions}, **{right}** of {cases} cases are right: losses within 1e-6,
norms and evaluation within 1e-5, replicas equal bit by bit. `dp` is ddp, fsdp, zero2 and zero3; `*`
marks what a switch of the model decides (biases, norms of queries and keys, tied embeddings, clips,
windows). A strategy in neither column was not tried.

| types | right | refused |
|---|---|---|
{rows}

- Combinations (fsdp+tp, fsdp+pp, fsdp+ep+pp) have the verdict of their parts{combined}.
- Adapters of rank 3 on all linear layers and stacked experts have the verdicts of the model
  (ddp, fsdp, tp, ep, zero3){lora}. Other `targets`, `trainable` and `quantize` were not tried.
- In these types a token depends on the documents before its own in a packed row, on one process
  too. `fit` warns; data.cross_document_attention true accepts it: {leaks}.
- In these, layers choose tokens of equal scores by their order in the row, so that a document's
  place matters: {places}.
- The commonest reasons for a refusal: {reasons}. `fit` and `plan` print your model's.
- Not tried: {composed} types that are made of several models. Not trained: {not_run}.

"""


def page(found: dict[str, Any], axes: list[str]) -> str:
    """Returns docs/models.md with the table `found`: types with the same verdicts share a row."""
    reasons: dict[str, set[str]] = {}
    leaks: list[str] = []
    places: list[str] = []
    composed: list[str] = []
    not_run: list[str] = []
    models = found["models"]
    tried = {kind: entry["variants"] for kind, entry in models.items() if "variants" in entry}
    for kind, entry in models.items():
        if kind not in tried:
            (composed if COMPOSED in entry.get("not_run", "") else not_run).append(kind)
        leaks += [kind] * ("documents" in entry.get("leaks", {}))
        places += [kind] * ("place" in entry.get("leaks", {}))
        for variant in entry.get("variants", []):
            for name, why in variant["refused"].items():
                reasons.setdefault(f"{_general(why)} ({name.rpartition('+')[2]})", set()).add(kind)
    num_right = sum(len(variant["right"]) for variants in tried.values() for variant in variants)
    num_refused = sum(
        len(variant["refused"]) for variants in tried.values() for variant in variants
    )
    single = [name for name in axes if "+" not in name or name in ("fsdp+ep", "fsdp+cp")]
    adapted = [name for name in axes if name.startswith("lora+")]
    commonest = sorted(reasons.items(), key=lambda item: -len(item[1]))[:4]
    table = TABLE.format(
        versions=", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        right=num_right,
        cases=num_right + num_refused,
        rows=_rows(tried, single),
        combined=_unlike(tried, COMBINED),
        lora=_unlike(tried, {name: (name.removeprefix("lora+"),) for name in adapted}),
        leaks=", ".join(leaks),
        places=", ".join(places) or "none",
        reasons="; ".join(f"{why}: {len(kinds)} types" for why, kinds in commonest),
        composed=len(composed),
        not_run=", ".join(not_run),
    )
    before, _, rest = PAGE.read_text("utf-8").partition(START)
    return before + START + table + END + rest.partition(END)[2]


def _rows(tried: dict[str, list[dict[str, Any]]], axes: list[str]) -> str:
    """Returns a row for each pair of right and refused strategies, the commonest first."""
    rows: dict[tuple[str, str], list[str]] = {}
    for kind, variants in tried.items():
        marks = {name: _mark(variants, name) for name in axes}
        right = [name for name, mark in marks.items() if mark in "✓◐"]
        refused = ", ".join(_short(name) for name, mark in marks.items() if mark == "–")
        names = (
            ["dp", *(n for n in right if n not in DATA_PARALLEL)]
            if {*DATA_PARALLEL} <= {*right}
            else right
        )
        stars = ", ".join(_short(name) + "*" * (marks.get(name) == "◐") for name in names)
        rows.setdefault((stars, refused), []).append(kind)
    ordered = sorted(rows.items(), key=lambda row: -len(row[1]))
    return "\n".join(f"| {', '.join(kinds)} | {' | '.join(marks)} |" for marks, kinds in ordered)


def _unlike(tried: dict[str, list[dict[str, Any]]], combined: dict[str, tuple[str, ...]]) -> str:
    """Returns where a combination's verdict is another than its parts'."""
    texts = []
    for name, parts in combined.items():
        for mark, word in (("✓", "right"), ("–", "refused"), (NOT_TRIED, "not tried")):
            kinds = []
            for kind, variants in tried.items():
                marks = {_mark(variants, part) for part in parts}
                expected = next(each for each in (NOT_TRIED, "–", "◐", "✓") if each in marks)
                kinds += [kind] * (_mark(variants, name) == mark != expected)
            texts += [f"{_short(name)} {word} for {', '.join(kinds)}"] if kinds else []
    return "; but " + "; ".join(texts) if texts else ""


def _short(name: str) -> str:
    name = name.removeprefix("lora+")
    return name.removeprefix("fsdp+") if name in ("fsdp+ep", "fsdp+cp") else name


def _mark(variants: list[dict[str, Any]], axes: str) -> str:
    right, refused = (
        {axes in variant[name] for variant in variants} for name in ("right", "refused")
    )
    if True in right and True in refused:
        return "◐"
    return "✓" if True in right else "–" if True in refused else NOT_TRIED


def _general(why: str) -> str:
    """Returns a reason without the names and sizes of one model."""
    why = re.sub(r"a model of type '[^']+' (does not run[^:]*: )?", "", why)
    why = re.sub(r"\w+ cannot be (a pipeline|sharded as configured): ", "", why)
    why = re.sub(r"stage \d of \d", "a stage", why)
    return re.sub(r"; .*|: set .*|: model\..*| \(.*| with [cpt]+p_size \d", "", why).strip(" :")
