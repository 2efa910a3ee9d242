"""How the training loss moves: it rises, jumps, has spikes, oscillates."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...history.metrics import Series
from ...history.run import History
from .. import expected, robust
from ..causes import of_small_batch, too_hot
from ..engine import rule
from ..finding import Finding

MIN_POINTS = 6  # log steps; fewer show no trend
SIGMAS = 4.0  # of the noise between log steps; less is noise
RISE = 0.05  # of the loss, beyond which a rise is one
JUMP, EARLY_STEPS = 0.25, 20  # of the lowest loss so far; and steps after the start that are its first ones
STAYS = 0.1  # of the lowest, at the next log step: weights that were thrown need more than one to come back
LOST = 2.0  # times where it began: no noise between batches does that
SPIKE_SIGMAS, SPIKE_SHARE = 6.0, 0.15  # above the running median: in noise (numerics.spike_sigmas), and of the loss
SPIKE_WINDOW = 9  # log steps of the running median
LEAST = 0.5  # nats: near zero all noise is large beside it
ALONE = 0.7  # of the entries above it have none beside them
OSCILLATES = 0.06  # noise between log steps, of the loss; batches of a thousand tokens and more have 0.01 to 0.03


def _loss(history: History) -> Series:
    return history.metrics["train/loss"].finite()


@rule
def loss_rises(history: History) -> Iterator[Finding]:
    """The loss had been lower, and stays up; or was thrown far above where it began."""
    loss = _loss(history)
    if len(loss) < MIN_POINTS:
        return
    few = robust.binned(loss)
    best = int(np.argmin(few.values[:-1]))
    begins, end = float(loss.values[0]), robust.tail(loss)
    limit = max(SIGMAS * robust.noise(loss.values), RISE * abs(few.values[best]))
    rise = end - float(few.values[best])
    if (rise <= limit or best >= len(few) - 3) and end <= LOST * max(begins, LEAST):
        return
    is_lost = end > begins or rise > 0.5 * max(begins - float(few.values[best]), 0.0)
    at_best = int(few.steps[best])
    yield Finding(
        "loss_rises", "error" if is_lost else "warning", "certain" if end > begins else "likely", "the loss diverges",
        f"train/loss was {few.values[best]:.4g} around step {at_best} and is {end:.4g} at step {loss.steps[-1]} "
        f"(it began at {begins:.4g}).",
        too_hot(history, at_best),
        steps=(at_best, int(loss.steps[-1])),
        explains=("loss_oscillates", "loss_spikes", "loss_jumped_at_the_start", "loss_stands_still", "experts_unused"),
    )  # fmt: skip


@rule
def loss_jumped_at_the_start(history: History) -> Iterator[Finding]:
    """In its first steps the loss went far up, though it came back."""
    loss = _loss(history)
    if len(loss) < MIN_POINTS:
        return
    early = loss[loss.steps <= max(expected.settled_after(history) + EARLY_STEPS, loss.steps[MIN_POINTS - 1])]
    values = early.values
    lowest = np.minimum.accumulate(values)  # so far
    stays = np.minimum(values[:-1], values[1:]) - lowest[:-1]  # at the next log step too: what does not is a spike
    top = int(np.argmax(stays))
    jump = float(values[top] - lowest[top])
    if jump <= max(SPIKE_SIGMAS * robust.noise(loss.values), JUMP * lowest[top]) or stays[top] < STAYS * lowest[top]:
        return
    yield Finding(
        "loss_jumped_at_the_start", "warning", "likely", "the loss jumped in the first steps",
        f"train/loss was {lowest[top]:.4g}, then {values[top]:.4g} at step {early.steps[top]}, and is "
        f"{robust.tail(loss):.4g} at step {loss.steps[-1]}.",
        too_hot(history, float(early.steps[int(np.argmin(values[: top + 1]))]))[:2],
        steps=(int(loss.steps[0]), int(early.steps[top])), explains=("loss_spikes",),
    )  # fmt: skip


@rule
def loss_spikes(history: History) -> Iterator[Finding]:
    """Single log steps far above their neighbours, which the curve comes back from."""
    loss = robust.later(_loss(history), expected.settled_after(history))
    if len(loss) < 2 * SPIKE_WINDOW:
        return
    usual = robust.running_median(loss.values, SPIKE_WINDOW)
    above = loss.values - usual
    found = above > np.maximum(SPIKE_SIGMAS * robust.noise(above), SPIKE_SHARE * usual)
    spikes = loss[found]
    begins = np.flatnonzero(found & ~np.roll(found, 1))  # entries that follow each other are one spike
    if len(begins) < 2:
        return
    worst = int(np.argmax(spikes.values))
    # Where the next log step is as good as before, the weights were not thrown: the samples were others.
    alone = len(begins) > ALONE * found.sum() and not expected.rate_is_high(history)
    causes = [*of_small_batch(history), *too_hot(history, math.inf)]
    yield Finding(
        "loss_spikes", "warning", "likely", "the loss has spikes",
        f"{len(begins)} spikes; the worst is {spikes.values[worst]:.4g} at step {spikes.steps[worst]}, where "
        f"{usual[np.flatnonzero(found)[worst]]:.4g} was usual.",
        [causes[-1], *causes[:-1]] if alone else causes,
        steps=robust.span(spikes),
    )  # fmt: skip


@rule
def loss_oscillates(history: History) -> Iterator[Finding]:
    loss = robust.later(_loss(history), expected.settled_after(history))
    if len(loss) < 3 * MIN_POINTS:
        return
    half = loss[len(loss) // 2 :]
    shake, level = robust.noise(half.values), robust.median(half.values)
    if shake < OSCILLATES * level or level < LEAST:
        return
    yield Finding(
        "loss_oscillates", "warning", "likely", "the loss oscillates",
        f"From one log step to the next train/loss moves by {shake:.2g} around {level:.3g} (steps {half.steps[0]} to "
        f"{half.steps[-1]}).",
        [*of_small_batch(history), *too_hot(history, math.inf)],
        steps=robust.span(half),
    )  # fmt: skip
