"""A loss or a gradient that is no number."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...history.run import History
from .. import expected
from ..causes import bf16
from ..engine import rule
from ..finding import Cause, Change, Finding

RISEN = 1.2  # times the lowest loss so far: then it went wrong before it was no number


@rule
def loss_not_finite(history: History) -> Iterator[Finding]:
    """From what the numerics guard wrote, or from the loss itself where the guard saw nothing."""
    raw = history.metrics["train/loss"]
    seen = [each for each in history.incidents if each.get("kind") == "non_finite"]
    lost = raw[~np.isfinite(raw.values)]
    if not seen and not len(lost):
        return
    first = seen[0]["step"] if seen else int(lost.steps[0])
    last = seen[-1]["step"] if seen else int(lost.steps[-1])
    ranks = sorted({rank for each in seen for rank in each.get("suspects", [])})
    bad = next((each["first_bad"] for each in seen if each.get("first_bad")), None)
    stopped = bool(seen) and seen[-1]["decision"] == "stop"
    parts = [f"{len(seen) or len(lost)} step{'s' * (max(len(seen), len(lost)) > 1)}, the first one {first}"]
    if seen and math.isfinite(seen[0]["loss"]):
        parts.append(f"the loss was {seen[0]['loss']:.4g} and the gradient was not finite")
    if bad:
        parts.append(f"the first bad {bad['what']} is that of {bad['module']}")
    yield Finding(
        "loss_not_finite", "error" if stopped or not seen or len(seen) > 3 else "warning", "certain",
        "the loss or the gradient is not finite",
        "; ".join(parts) + ".",
        _why_not_finite(history, first, bad, ranks, seen),
        steps=(first, last), ranks=ranks, explains=("loss_rises", "loss_spikes", "loss_jumped_at_the_start"),
    )  # fmt: skip


def _why_not_finite(history: History, first: int, bad: dict | None, ranks: list[int], seen: list) -> list[Cause]:
    precision = str(history.key("trainer.precision", "32-true"))
    loss = history.metrics["train/loss"].finite()
    before = loss.values[loss.steps < first]
    # Before the first step no rate has done anything: then it is the model, the data or the precision.
    hot = first > 2 and (expected.rate_is_high(history) or (len(before) > 1 and before[-1] > RISEN * before.min()))
    causes = []
    if precision.startswith("16"):
        causes.append(Cause(f"{precision} overflows above 65,504.", [bf16(history)]))
    if hot:
        causes.append(Cause("The learning rate is too high.", expected.lower_rate(history, first - 1)))
    if bad:
        sentence = f"{bad['module']} is where it begins ({bad['what']}): look at its code and its weights."
        causes.insert(0 if not hot else len(causes), Cause(sentence))
    if len(seen) > 1 and len(ranks) == 1:
        causes.insert(0, Cause(f"Always rank {ranks[0]}, with other samples each time: suspect its hardware."))
    rows = seen[0]["ranks"][ranks[0]].get("rows") if seen and ranks and "ranks" in seen[0] else None
    told = f"; rank {ranks[0]} had rows {rows}" if rows else ""
    skip = Change("numerics.on_non_finite", history.key("numerics.on_non_finite"), "skip")
    return [*causes, Cause(f"The samples of that step are bad{told}: look at them, or leave such steps out.", [skip])]
