"""What the gradient's norm, the clipping and the learning rate tell."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...history.run import History
from .. import expected, robust
from ..engine import rule
from ..finding import Cause, Change, Finding

MIN_POINTS = 10  # log steps after the start
DRIFT = 4.0  # times the norm may grow after the warm-up, and beyond half of an untrained model's: it falls first
STEADY = 0.8  # of pairs of medians in which the later is higher: a trend, not noise
MOST = 0.5  # of the steps
FAR_ABOVE = 5.0  # times the clip value: there clipping decides the direction's length alone
KEPT_QUANTILE = 0.9  # of the norms: a clip value above it touches outliers only
SPIKES = 30.0  # times the median of the neighbours
EXPLODES = 100.0  # of a mean loss over tokens; transformers have 0.1 to 10 from their first step on


@rule
def gradient_is_zero(history: History) -> Iterator[Finding]:
    norm = history.metrics["train/grad_norm"].finite()
    if len(norm) < 3 or robust.tail(norm) > 0:
        return
    yield Finding(
        "gradient_is_zero", "error", "certain", "no gradient reaches the parameters",
        f"train/grad_norm is 0 at the last {robust.window(norm)} log steps, up to step {norm.steps[-1]}.",
        [
            Cause("No label counts: all are -100 (see data/counted_share)."),
            Cause("Nothing joins the loss to the parameters: look for .detach() and no_grad in module.py."),
        ],
        steps=robust.span(norm), explains=("loss_stands_still",),
    )  # fmt: skip


@rule
def gradient_norm_drifts(history: History) -> Iterator[Finding]:
    """It grows, and goes on growing, long before the loss shows it."""
    norm = robust.later(history.metrics["train/grad_norm"].finite(), expected.settled_after(history))
    if len(norm) < 2 * MIN_POINTS:
        return
    first, last = robust.head(norm), robust.tail(norm)
    untrained = float(history.metrics["train/grad_norm"].finite().values[0])
    if last < DRIFT * max(first, untrained / 2) or robust.rising_share(norm) < STEADY:
        return
    decay = history.key("model.optim.weight_decay")
    decays = [Change("model.optim.weight_decay", decay, 0.1)] if decay is not None and decay < 0.1 else []
    yield Finding(
        "gradient_norm_drifts", "warning", "likely", "the gradient norm grows and grows",
        f"train/grad_norm went from {first:.3g} to {last:.3g} between steps {norm.steps[0]} and {norm.steps[-1]}.",
        [
            Cause("The learning rate is too high for this stage.", expected.lower_rate(history)),
            Cause("Weights grow without limit.", decays),
        ],
        steps=robust.span(norm),
    )  # fmt: skip


@rule
def gradient_explodes(history: History) -> Iterator[Finding]:
    """Single norms far beyond what is usual."""
    norm = robust.later(history.metrics["train/grad_norm"].finite(), expected.settled_after(history))
    if len(norm) < MIN_POINTS:
        return
    usual = robust.running_median(norm.values, 9)
    wild = norm[(norm.values > SPIKES * usual) | (norm.values > EXPLODES)]
    if not len(wild):
        return
    top = int(np.argmax(wild.values))
    usual = robust.median(norm.values)
    clip = history.key("trainer.gradient_clip_val")
    clips = [] if clip else [Change("trainer.gradient_clip_val", clip, min(robust.rounded(2 * usual), 1.0))]
    unclipped = Cause("Nothing clips the gradients.", clips)
    rate = Cause("The learning rate is too high.", expected.lower_rate(history))
    yield Finding(
        "gradient_explodes", "warning", "likely", "gradients explode",
        f"train/grad_norm was {wild.values[top]:.3g} at step {wild.steps[top]}, where {usual:.3g} is usual; "
        f"{len(wild)} log step{'s' * (len(wild) > 1)} in all.",
        [
            *([rate] if expected.rate_is_high(history) else []),
            *([unclipped] if clips else []),
            Cause("The weights are too large: an initialisation, a scale or a missing norm in the model."),
            Cause("Single samples are bad: look at those of that step."),
        ],
        steps=robust.span(wild), explains=("clips_most_steps", "loss_knows_frequencies"),
    )  # fmt: skip


@rule
def clips_most_steps(history: History) -> Iterator[Finding]:
    """Then the learning rate is not what sets the step's length."""
    clip, norm = history.key("trainer.gradient_clip_val"), history.metrics["train/grad_norm"].finite()
    norm = robust.later(norm, expected.settled_after(history))
    share = robust.later(history.metrics["health/clipped_share"].finite(), expected.settled_after(history))
    if not clip or len(norm) < MIN_POINTS:
        return
    clipped = robust.median(share.values) if len(share) else float(np.mean(norm.values > clip))
    usual = robust.median(norm.values)
    if clipped <= MOST:
        return
    far = usual > FAR_ABOVE * clip
    to = robust.rounded(float(np.quantile(norm.values, KEPT_QUANTILE)), 2)
    yield Finding(
        "clips_most_steps", "warning" if far else "info", "certain", "most steps are clipped",
        f"{clipped:.0%} of the steps since {norm.steps[0]} were above trainer.gradient_clip_val {clip:g}; the usual "
        f"norm is {usual:.3g}.",
        [
            Cause("The clip value is below this model's usual norm.", [Change("trainer.gradient_clip_val", clip, to)]),
        ]
        + ([Cause("The learning rate is too high.", expected.lower_rate(history))] * expected.rate_is_high(history)),
        steps=robust.span(norm),
    )  # fmt: skip


@rule
def rate_above_peak(history: History) -> Iterator[Finding]:
    rate, peak = history.metrics["train/learning_rate"].finite(), history.key("model.optim.learning_rate")
    if not peak or not len(rate) or rate.values.max() <= 1.01 * peak:
        return
    above = rate[rate.values > 1.01 * peak]
    yield Finding(
        "rate_above_peak", "error" if above.values.max() > 2 * peak else "warning", "certain",
        "the learning rate is above its schedule's peak",
        f"train/learning_rate was {above.values.max():.3g} at step {above.steps[int(np.argmax(above.values))]}; "
        f"model.optim.learning_rate is {peak:.3g}.",
        [
            Cause("A callback or scheduler of yours sets the rate, or multiplies it a second time: see optim.py."),
            Cause("A resumed run took its schedule from another configuration."),
        ],
        steps=robust.span(above),
    )  # fmt: skip
