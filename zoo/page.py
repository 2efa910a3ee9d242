"""docs/models.md: the table of cases.py for readers."""

from __future__ import annotations

import re
from typing import Any

NOT_TRIED = "·"
PAGE = """# Models

Which causal language models of transformers train under which strategies to the numbers of one process: small odd
models of each type, six steps on packed documents with masked labels, accumulation and clipping, by
`python -m zoo`. `fit`, `plan` and `launch` read the same table: what it calls right is silent, what it
refuses is a sentence before anything is built, and everything else is one line that names `rehearse`, which compares
your model with one process in a minute.

{versions}. **{right}** of {cases} cases are right: losses within 1e-6, norms and evaluation within 1e-5, replicas
equal bit by bit. A type with switches (biases, norms of queries and keys, tied embeddings) was tried with both.
DDP of a model that leaves parameters unused, such as BART's decoder, is `ddp_find_unused_parameters_true`.

| mark | meaning |
|---|---|
| ✓ | right |
| ◐ | right, or refused, by the model's switches |
| – | refused, in a sentence |
| · | not tried: `fit` says so |

{rows}

## LoRA

The same with adapters of rank 3 on all linear layers and stacked experts (`model.adapter.targets all-linear`), against
one process with the same adapters. Adapters of other `targets`, `trainable` and `quantize` are not in this table.

{lora}

## Documents that see each other

In these types a token depends on the documents before its own in a packed row, on one process too, because their layers
carry a state or ignore positions. `fit` warns; data.cross_document_attention true accepts it.

{leaks}

## Why a strategy is refused

{reasons}

## Not trained

{not_run}
"""


def page(found: dict[str, Any], axes: list[str]) -> str:
    """Returns docs/models.md of the table `found`: types with the same verdicts share a row."""
    reasons: dict[str, set[str]] = {}
    leaks: list[str] = []
    not_run: dict[str, list[str]] = {}
    for kind, entry in found["models"].items():
        if "variants" not in entry:
            not_run.setdefault(_general(entry.get("not_run", "not tried"))[:120], []).append(kind)
            continue
        leaks += [kind] * ("documents" in entry.get("leaks", {}))
        for variant in entry["variants"]:
            for name, why in variant["refused"].items():
                reasons.setdefault(_general(why), set()).add(f"{kind} ({name})")
    verdicts = [len(variant["right"]) for entry in found["models"].values() for variant in entry.get("variants", [])]
    refusals = [len(variant["refused"]) for entry in found["models"].values() for variant in entry.get("variants", [])]
    return PAGE.format(
        versions=", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        right=sum(verdicts),
        cases=sum(verdicts) + sum(refusals),
        rows=_rows(found, [name for name in axes if not name.startswith("lora+")]),
        lora=_rows(found, [name for name in axes if name.startswith("lora+")]),
        leaks=", ".join(leaks) + ".",
        reasons="\n".join(f"- {why}: {', '.join(sorted(kinds))}." for why, kinds in sorted(reasons.items())),
        not_run="\n".join(f"- {why}: {', '.join(kinds)}." for why, kinds in sorted(not_run.items())),
    )


def _rows(found: dict[str, Any], axes: list[str]) -> str:
    """Returns the table of `axes`; types of which none was tried have no row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for kind, entry in found["models"].items():
        marks = tuple(_mark(entry.get("variants", []), name) for name in axes)
        if {*marks} != {NOT_TRIED}:
            rows.setdefault(marks, []).append(kind)
    names = [name.removeprefix("lora+") for name in axes]
    lines = ["| types | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for marks, kinds in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {', '.join(kinds)} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def _mark(variants: list[dict[str, Any]], axes: str) -> str:
    right, refused = ({axes in variant[name] for variant in variants} for name in ("right", "refused"))
    if True in right and True in refused:
        return "◐"
    return "✓" if True in right else "–" if True in refused else NOT_TRIED


def _general(why: str) -> str:
    """Returns a reason without the names and sizes of one model."""
    why = re.sub(r"a model of type '[^']+' ", "", why)
    why = re.sub(r"\w+ cannot be a pipeline: ", "", why)
    return re.sub(r"; .*|: set .*|: model\..*| \(.*| with [cpt]+p_size \d", "", why).strip()
