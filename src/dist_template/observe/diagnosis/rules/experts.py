"""How a mixture of experts distributes its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...history.run import History
from .. import expected, robust
from ..engine import rule
from ..finding import Cause, Change, Finding

MIN_POINTS = 3  # log steps after the start
DEAD = 0.1  # of all experts: a few without a token in one window happen
COLLAPSED = 0.5  # of all experts
FEWEST_STEPS_TO_CROSS = 100  # a bias that crosses a router's whole range of scores in fewer overshoots
USUAL_SPEED = 0.001  # DeepSeek-V3's (arXiv:2412.19437, section 4.2)
USUAL_COEF = 0.01  # Switch Transformer's (arXiv:2101.03961, section 2.2)


def _num_experts(history: History) -> int:
    """Routed experts of all layers; 0 where it is not known."""
    return (history.fact("model.experts") or 0) * (history.fact("model.layers") or 0)


def _ceiling(history: History) -> float | None:
    """The largest possible load over the mean: each of a token's choices falls on the same few experts."""
    experts, chosen = history.fact("model.experts"), history.fact("model.experts_per_token")
    return experts / chosen if experts and chosen else None


def _balance(history: History) -> list[Cause]:
    """What balances this model's routers, and how to make it stronger."""
    if history.fact("balance.has_bias"):
        now = history.key("model.balance.bias_update_speed") or 0.0
        # Scores are between 0 and 1: in the run's steps a bias must be able to move that far.
        speed = min(max(USUAL_SPEED, 1 / expected.max_steps(history)), 1 / FEWEST_STEPS_TO_CROSS)
        key, to = "model.balance.bias_update_speed", speed if now < speed else 2 * now
        how = "Nothing moves the routers' biases" if not now else "The routers' biases move too slowly"
    else:
        now = history.fact("balance.aux_loss_coef") or 0.0
        # A short run needs a stronger term: in 1000 steps the usual weight evens out the loads of a small model.
        coef = min(max(USUAL_COEF, 10 / expected.max_steps(history)), 10 * USUAL_COEF)
        key, to = "model.balance.aux_loss_coef", coef if now < coef else 2 * now
        how = "No loss term balances the load" if not now else "The load-balancing loss weighs too little"
    return [
        Cause(f"The router has collapsed. {how}.", [Change(key, now, robust.rounded(to))]),
        Cause("The learning rate is too high for the router.", expected.lower_rate(history)),
    ]


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
    """Above the geometric mean of an even load, 1, and the ceiling."""
    load = robust.later(history.metrics["moe/expert_load_max_over_mean"].finite(), expected.settled_after(history))
    ceiling = _ceiling(history)
    if len(load) < MIN_POINTS or not ceiling or robust.tail(load) < math.sqrt(ceiling):
        return
    yield Finding(
        "experts_overloaded", "warning", "likely", "one expert gets most of the tokens",
        f"The busiest expert has {robust.tail(load):.1f} times the mean, at the last log steps up to {load.steps[-1]};"
        f" {ceiling:.3g}, experts over experts per token, is the most there can be.",
        _balance(history),
        steps=robust.span(load),
    )  # fmt: skip
