"""What the training loss tells: it stands still, rises, jumps, is no number, or is too good to be true."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...history.metrics import Series
from ...history.run import History
from .. import expected, robust
from ..engine import rule
from ..finding import Cause, Change, Finding

MIN_POINTS = 6  # log steps; fewer show no trend
STANDS_STILL = 0.03  # of the loss: any sensible rate takes more off an untrained model's in its first steps
UNTRAINED = 0.8  # of ln(vocabulary): a loss above it is one of a model that knows next to nothing
SIGMAS = 4.0  # of the noise between log steps; less is noise
RISE = 0.05  # of the loss, beyond which a rise is one
SPIKE_SIGMAS, SPIKE_SHARE = 8.0, 0.15  # above the running median: in noise, and of the loss itself
SPIKE_WINDOW = 9  # log steps of the running median
OSCILLATES = 0.12  # noise between log steps, of the loss; batches of some thousand tokens have 0.01 to 0.05
TOO_GOOD_BITS = 0.3  # per byte of unseen text; the best models need 0.5 and more
SEEN = 4  # times a token may be trained on as if it were new (Muennighoff et al., arXiv:2305.16264)


def _loss(history: History) -> Series:
    return history.metrics["train/loss"].finite()


def _span(series: Series) -> tuple[int, int]:
    return int(series.steps[0]), int(series.steps[-1])


@rule
def loss_stands_still(history: History) -> Iterator[Finding]:
    """An untrained model whose loss does not fall."""
    loss, uniform = _loss(history), expected.uniform_loss(history)
    after = robust.later(loss, expected.settled_after(history))
    if len(loss) < MIN_POINTS or len(after) < 3:
        return
    begins = float(loss.values[0])
    untrained = begins > UNTRAINED * uniform if uniform else expected.is_from_scratch(history)
    fall = begins - robust.tail(loss)
    if not untrained or fall > STANDS_STILL * begins or fall < -RISE * begins:
        return
    causes = list(_why_it_stands(history))
    yield Finding(
        "loss_stands_still",
        "error",
        "certain" if fall < STANDS_STILL / 3 * begins else "likely",
        "the loss does not fall",
        f"train/loss was {begins:.4g} at step {loss.steps[0]} and is {robust.tail(loss):.4g} at step {loss.steps[-1]}"
        + (f"; a model that knows nothing has {uniform:.4g}, ln(vocabulary)." if uniform else "."),
        causes,
        steps=_span(loss),
    )


def _why_it_stands(history: History) -> Iterator[Cause]:
    """The likeliest first: what is known to be so, then what the numbers suggest."""
    norm = history.metrics["train/grad_norm"].finite()
    total, trainable = history.fact("parameters.total", 0), history.fact("parameters.trainable", 0)
    now, usual = expected.peak_rate(history), expected.usual_rate(history)
    higher = [Change("model.optim.learning_rate", now, robust.rounded(usual))] if now and usual else []
    if total and trainable < total / 2:
        yield Cause(
            f"{1 - trainable / total:.1%} of the parameters are frozen ({trainable:,} of {total:,} are trained): look "
            "for requires_grad_(False) in module.py."
        )
    if len(norm) and robust.median(norm.values) == 0:
        yield Cause("The gradient is zero: nothing joins the loss to the parameters (a .detach(), no_grad, a mask).")
    if expected.rate_is_low(history):
        yield Cause(f"The learning rate is too low: {now:.2g} where {usual:.1g} is usual for this size.", higher)
    elif expected.rate_is_high(history):
        yield Cause(
            f"The learning rate is too high: {now:.2g} where {usual:.1g} is usual; it has destroyed the start.",
            expected.lower_rate(history),
        )
    yield Cause("The labels have nothing to do with the inputs: look at a batch (shift, tokenizer, shuffled labels).")
    if not expected.rate_is_low(history) and not expected.rate_is_high(history):
        yield Cause("The learning rate does not suit the model.", higher)


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
    if rise <= limit or best >= len(few) - 3:
        return
    is_lost = end > begins or rise > 0.5 * max(begins - float(few.values[best]), 0.0)
    at_best = int(few.steps[best])
    yield Finding(
        "loss_rises",
        "error" if is_lost else "warning",
        "certain" if end > begins else "likely",
        "the loss diverges",
        f"train/loss was {few.values[best]:.4g} around step {at_best} and is {end:.4g} at step {loss.steps[-1]} "
        f"(it began at {begins:.4g}).",
        _too_hot(history, at_best),
        steps=(at_best, int(loss.steps[-1])),
        explains=("loss_oscillates", "loss_spikes", "loss_jumped_at_the_start", "loss_stands_still"),
    )


def _too_hot(history: History, went_well_until: float) -> list[Cause]:
    """What makes steps too large, in the order of what this run's settings suggest."""
    now, usual = expected.peak_rate(history), expected.usual_rate(history)
    compared = f": {now:.2g} where {usual:.1g} is usual for a model of this size" if now and usual else ""
    rate = Cause(f"The learning rate is too high{compared}.", expected.lower_rate(history, went_well_until))
    short = Cause("The warm-up is too short.", expected.longer_warmup(history))
    causes = [rate]
    no_warmup = expected.warmup_steps(history) < 2
    if short.changes and went_well_until <= expected.settled_after(history) + 2 * expected.SETTLED_STEPS:
        causes = [short, rate] if no_warmup and not expected.rate_is_high(history) else [rate, short]
    if not history.key("trainer.gradient_clip_val", 1.0):
        causes.append(Cause("Nothing clips the gradients.", [Change("trainer.gradient_clip_val", None, 1.0)]))
    if str(history.key("trainer.precision", "")).startswith("16"):
        causes.append(Cause("fp16 has too small a range.", [_bf16(history)]))
    return [*causes, Cause("The samples around that step are bad: look at them, or leave such steps out.", [_skip()])]


def _skip() -> Change:
    return Change("numerics.on_spike", "off", "skip")


def _bf16(history: History) -> Change:
    return Change("trainer.precision", history.key("trainer.precision"), "bf16-mixed")


@rule
def loss_jumped_at_the_start(history: History) -> Iterator[Finding]:
    """In its first steps the loss went above where it began, though it came back."""
    loss, uniform = _loss(history), expected.uniform_loss(history)
    if len(loss) < MIN_POINTS:
        return
    begins = float(loss.values[0])
    early = loss[loss.steps <= max(expected.settled_after(history) + 100, loss.steps[MIN_POINTS - 1])]
    top = int(np.argmax(early.values))
    jump = float(early.values[top]) - max(begins, uniform or 0.0)
    if not 0 < top or jump <= max(SIGMAS * robust.noise(loss.values), 2 * RISE * begins):
        return
    yield Finding(
        "loss_jumped_at_the_start",
        "warning",
        "likely",
        "the loss jumped in the first steps",
        f"train/loss was {begins:.4g} at step {loss.steps[0]}, {early.values[top]:.4g} at step {early.steps[top]}, and "
        f"is {robust.tail(loss):.4g} at step {loss.steps[-1]}.",
        _too_hot(history, float(loss.steps[0]))[:2],
        steps=(int(loss.steps[0]), int(early.steps[top])),
    )


@rule
def loss_spikes(history: History) -> Iterator[Finding]:
    """Single log steps far above their neighbours, which the curve comes back from."""
    loss = robust.later(_loss(history), expected.settled_after(history))
    if len(loss) < 2 * SPIKE_WINDOW:
        return
    usual = _running_median(loss.values)
    above = loss.values - usual
    found = above > np.maximum(SPIKE_SIGMAS * robust.noise(above), SPIKE_SHARE * usual)
    spikes = loss[found]
    begins = np.flatnonzero(found & ~np.roll(found, 1))  # entries that follow each other are one spike
    if len(begins) < 2:
        return
    worst = int(np.argmax(spikes.values))
    yield Finding(
        "loss_spikes",
        "warning",
        "likely",
        "the loss has spikes",
        f"{len(begins)} spikes; the worst is {spikes.values[worst]:.4g} at step {spikes.steps[worst]}, where "
        f"{usual[np.flatnonzero(found)[worst]]:.4g} was usual.",
        _too_hot(history, math.inf)[:-1]
        + [Cause("Some samples are bad; leave such steps out, and see which in incidents.jsonl.", [_skip()])],
        steps=_span(spikes),
    )


def _running_median(values: np.ndarray) -> np.ndarray:
    """(N,) the median of each entry's SPIKE_WINDOW neighbours."""
    padded = np.pad(values, SPIKE_WINDOW // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, SPIKE_WINDOW), axis=1)


@rule
def loss_oscillates(history: History) -> Iterator[Finding]:
    loss = robust.later(_loss(history), expected.settled_after(history))
    if len(loss) < 3 * MIN_POINTS:
        return
    half = loss[len(loss) // 2 :]
    shake, level = robust.noise(half.values), robust.median(half.values)
    if shake < OSCILLATES * level or level < 0.1:  # near zero everything is large beside it
        return
    tokens, size = history.fact("data.tokens_per_step"), history.key("data.global_batch_size")
    larger = [Change("data.global_batch_size", size, 4 * size)] if size else []
    of_batch = Cause(f"A step sees too few tokens ({tokens or 'unknown'}): each batch says something else.", larger)
    of_rate = Cause("The learning rate is too high.", expected.lower_rate(history))
    small = bool(tokens and tokens < 2000) and not expected.rate_is_high(history)
    yield Finding(
        "loss_oscillates",
        "warning",
        "likely",
        "the loss oscillates",
        f"From one log step to the next train/loss moves by {shake:.2g} around {level:.3g} (steps {half.steps[0]} to "
        f"{half.steps[-1]}).",
        [of_batch, of_rate] if small else [of_rate, of_batch],
        steps=_span(half),
    )


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
        "loss_not_finite",
        "error" if stopped or not seen or len(seen) > 3 else "warning",
        "certain",
        "the loss or the gradient is not finite",
        "; ".join(parts) + ".",
        _why_not_finite(history, first, bad, ranks, seen),
        steps=(first, last),
        ranks=ranks,
        explains=("loss_rises", "loss_spikes", "loss_jumped_at_the_start"),
    )


def _why_not_finite(history: History, first: int, bad: dict | None, ranks: list[int], seen: list) -> list[Cause]:
    precision = str(history.key("trainer.precision", "32-true"))
    early = first <= expected.settled_after(history) + expected.SETTLED_STEPS
    # Before the first step no rate has done anything: then it is the model, the data or the precision.
    hot = first > 2 and (expected.rate_is_high(history) or early)
    causes = []
    if precision.startswith("16"):
        causes.append(Cause(f"{precision} overflows above 65,504.", [_bf16(history)]))
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


@rule
def loss_too_good(history: History) -> Iterator[Finding]:
    """Better than any model is on text that it has not seen."""
    bits = history.metrics["eval/bits_per_byte"].finite()
    if not len(bits) or bits.last >= TOO_GOOD_BITS:
        return
    share = history.fact("data.duplicate_share")
    leak = Cause("The label stands in the input: labels must be the inputs moved by one (text/rows.py, module.py).")
    same = Cause("The validation split has the training split's text.")
    dull = Cause("The text repeats itself: it may be as easy as that.")
    yield Finding(
        "loss_too_good",
        "warning",
        "possible",
        "the validation loss is too good to be true",
        f"eval/bits_per_byte is {bits.last:.3g} at step {bits.steps[-1]}; the best models need 0.5 and more.",
        [same, leak, dull] if share else [leak, dull, same],
        steps=_span(bits[-1:]),
    )
