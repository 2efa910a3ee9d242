"""How a mixture of experts deals out its tokens."""

from __future__ import annotations

from collections.abc import Iterator

from ...history.run import History
from .. import expected, robust
from ..engine import rule
from ..finding import Cause, Change, Finding

MIN_POINTS = 3  # log steps after the start
DEAD = 0.1  # of all experts: a few without a token in one window happen
COLLAPSED = 0.5  # of all experts
OVERLOADED = 4.0  # times the mean: DeepSeek-V3's layers stay below 2, and above 4 the others mostly wait


def _num_experts(history: History) -> int:
    """Routed experts of all layers; 0 where it is not known."""
    return (history.fact("model.experts") or 0) * (history.fact("model.layers") or 0)


def _balance(history: History) -> list[Cause]:
    causes = []
    architecture = history.key("model.architecture") or {}
    if not history.key("model.pretrained") and "router_aux_loss_coef" in architecture:
        now = architecture["router_aux_loss_coef"]
        change = Change("model.architecture.router_aux_loss_coef", now, max(0.001, 10 * (now or 0)))
        causes.append(Cause("Nothing, or too little, makes the router share tokens out.", [change]))
    else:
        causes.append(Cause("The router has collapsed: nothing in the loss or in its bias makes it share tokens out."))
    causes.append(Cause("The learning rate is too high for the router.", expected.lower_rate(history)))
    return causes


@rule
def experts_unused(history: History) -> Iterator[Finding]:
    unused = robust.later(history.metrics["moe/unused_experts"].finite(), expected.settled_after(history))
    total = _num_experts(history)
    if len(unused) < MIN_POINTS or not total:
        return
    share = robust.tail(unused) / total
    if share <= DEAD:
        return
    yield Finding(
        "experts_unused", "error" if share >= COLLAPSED else "warning",
        "certain" if robust.median(unused.values) > DEAD * total else "likely",
        "experts get no tokens",
        f"{robust.tail(unused):.0f} of at most {total} experts had none at the last log steps, up to step "
        f"{unused.steps[-1]}.",
        _balance(history),
        steps=robust.span(unused), explains=("experts_overloaded",),
    )  # fmt: skip


@rule
def experts_overloaded(history: History) -> Iterator[Finding]:
    load = robust.later(history.metrics["moe/expert_load_max_over_mean"].finite(), expected.settled_after(history))
    if len(load) < MIN_POINTS or robust.tail(load) < OVERLOADED:
        return
    yield Finding(
        "experts_overloaded", "warning", "likely", "one expert gets most of the tokens",
        f"The busiest expert has {robust.tail(load):.1f} times the mean, at the last log steps up to {load.steps[-1]}.",
        _balance(history),
        steps=robust.span(load),
    )  # fmt: skip
