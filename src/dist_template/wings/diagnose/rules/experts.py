"""Rules about how a mixture of experts distributes its tokens."""

import math
from collections.abc import Iterator

from ...history import History
from .. import expected, robust
from ..finding import Cause, Change, Finding, Level

MIN_POINTS = 3  # log steps after the start
UNUSED = 0.1  # of all experts: a few without a token in one log step are normal
COLLAPSED = 0.5  # of all experts
MIN_STEPS = 100  # in which a bias may cross the router's range of scores; faster, it overshoots
USUAL_SPEED = 0.001  # DeepSeek-V3 (arXiv:2412.19437, section 4.2)
FALLING = 0.25  # of the pairs of log steps have a higher load at the later one; 0.5 without a trend
USUAL_COEF = 0.01  # Switch Transformer (arXiv:2101.03961, section 2.2)


def _balancing(history: History) -> list[Cause]:
    """Returns the causes of an unbalanced load, with a stronger setting of the balancing."""
    steps = expected.max_steps(history)
    if history.fact("balance.has_bias"):
        key = "model.balance.bias_update_speed"
        now = expected.highest(history.key(key))
        # Scores are between 0 and 1: a bias must be able to move by 1 during the run.
        least = robust.rounded(min(max(USUAL_SPEED, 1 / steps), 1 / MIN_STEPS))
        weak, missing = "Its biases move too slowly", "Its biases are not updated"
    else:
        key, now = "model.balance.aux_loss_coef", history.fact("balance.aux_loss_coef") or 0.0
        # With the usual coefficient a small model takes 1,000 steps; a shorter run needs more.
        least = robust.rounded(min(max(USUAL_COEF, 10 / steps), 10 * USUAL_COEF))
        weak, missing = "The load-balancing loss is too weak", "No loss balances the load"
    change = Change(key, now, max(least, robust.rounded(2 * now)))
    return [
        Cause(f"The router has collapsed. {weak if now else missing}.", [change]),
        Cause("The learning rate is too high for the router.", expected.lower_rate(history)),
    ]


def experts_unused(history: History) -> Iterator[Finding]:
    unused = expected.settled(history, "moe/unused_experts")
    total = (history.fact("model.experts") or 0) * (history.fact("model.layers") or 0)
    if len(unused) < MIN_POINTS or not total:
        return
    last = robust.tail(unused)
    if last <= UNUSED * total:
        return
    level: Level = "error" if last >= COLLAPSED * total else "warning"
    confidence = "certain" if robust.median(unused.values) > UNUSED * total else "likely"
    evidence = f"{last:.0f} of at most {total} experts got no token at the last log steps."
    title, explains = "experts get no tokens", ("experts_overloaded",)
    causes, steps = _balancing(history), robust.span(unused)
    yield Finding("experts_unused", level, confidence, title, evidence, causes, steps, (), explains)


def experts_overloaded(history: History) -> Iterator[Finding]:
    """Reports a load above the geometric mean of an even load (1) and the highest one. A load that
    still falls is reported at the end of training alone: balancing takes time."""
    load = expected.settled(history, "moe/expert_load_max_over_mean")
    experts, chosen = history.fact("model.experts"), history.fact("model.experts_per_token")
    if len(load) < MIN_POINTS or not experts or not chosen:
        return
    highest, last = experts / chosen, robust.tail(load)  # all tokens choose the same experts
    falls = robust.rising_share(expected.metric(history, "moe/expert_load_max_over_mean")) < FALLING
    if last < math.sqrt(highest) or (falls and load.steps[-1] < expected.max_steps(history)):
        return
    evidence = (
        f"The busiest expert gets {last:.1f} times the mean load at the last log steps; at most"
    )
    evidence += f" {highest:.3g} times are possible (experts / experts per token)."
    title, steps = "one expert gets most of the tokens", robust.span(load)
    yield Finding(
        "experts_overloaded", "warning", "likely", title, evidence, _balancing(history), steps
    )
