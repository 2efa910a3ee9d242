"""Rules about the training loss."""

import math
from collections.abc import Iterator

import numpy as np

from ...history import History, Series
from .. import expected, robust
from ..finding import Cause, Change, Finding, Level

MIN_POINTS = 6  # log steps; fewer show no trend
NOISE_SIGMAS = 4.0  # a smaller rise is noise between log steps
FEW = 5.0  # log steps, between which the noise is not known well: as much again is allowed for
RISE = 0.05  # of the lowest loss; a smaller rise is not reported
LOST = 2.0  # times the first loss; noise between batches does not reach it
MIN_LOSS = 0.5  # nats: below, relative noise is large
JUMP, JUMP_STAYS = 0.25, 0.1  # of the lowest loss so far: at the jump, and a log step later
EARLY_STEPS = 20  # after the settled step: still the start of training
SPIKE_SIGMAS, SPIKE_SHARE = 6.0, 0.15  # above the running median: in noise, and of the loss
WIDTH = 9  # log steps of a running median
ISOLATED = 0.7  # of the spikes' log steps have no spike next to them
NO_DECREASE = 0.03  # of the first loss: any sensible learning rate decreases it by more
SWINGS = 0.08  # of the loss, between log steps; healthy runs of 1,000 tokens a step have 0.03
USUAL_TOKENS = 2**15  # of an optimizer step; with fewer, a larger batch is proposed
CONFIDENT = 2.0  # times ln(vocabulary): a trained model may be sure of what is wrong

UNTRAINED = 0.8  # of ln(vocabulary): an untrained model has a higher loss


def loss_diverges(history: History) -> Iterator[Finding]:
    """Reports a loss that rose and stayed high, or is far above its first value."""
    name = expected.training_loss(history)
    loss = expected.metric(history, name)
    if len(loss) < MIN_POINTS:
        return
    curve = robust.binned(loss)
    values = robust.running_median(curve.values, 3)  # the lowest of noisy values is an outlier
    best = int(np.argmin(values[:-1]))
    lowest, step = float(values[best]), int(curve.steps[best])
    first, end = float(loss.values[0]), robust.tail(loss)
    # Of the steps until then, if they are enough: a divergence is no noise of its own.
    until = loss.values[loss.steps <= step]
    quiet = until if len(until) >= 2 * WIDTH else loss.values
    rise, noise = end - lowest, robust.noise(quiet) * (1 + FEW / len(quiet))
    is_high = rise > max(NOISE_SIGMAS * noise, RISE * abs(lowest))
    is_lost = end > LOST * max(robust.head(loss), MIN_LOSS)
    if (
        not (is_high and best < len(curve) - 3)
        and not is_lost
        or _is_best_validation(history, loss)
    ):
        return
    is_lost = end > first or rise > 0.5 * max(first - lowest, 0.0)
    level, confidence = "error" if is_lost else "warning", "certain" if end > first else "likely"
    evidence = (
        f"{name} was {lowest:.4g} around step {step} and is {end:.4g} at step {loss.steps[-1]}"
    )
    evidence += f" (first value: {first:.4g})."
    causes, steps = expected.instability_causes(history, step), (step, int(loss.steps[-1]))
    explains = ("loss_spikes", "early_loss_jump", "loss_not_decreasing", "loss_oscillates")
    explains += ("experts_unused",)
    title = "the loss diverges"
    yield Finding("loss_diverges", level, confidence, title, evidence, causes, steps, (), explains)


def _is_best_validation(history: History, loss: Series) -> bool:
    """Returns whether the run's last validation, at the end of `loss`, is its best: the model still
    learns."""
    validated = expected.metric(history, expected.validation_loss(history))
    if len(validated) < 2 or validated.steps[-1] < loss.steps[-2]:
        return False
    return bool(validated.values[-1] < validated.values[:-1].min())


def early_loss_jump(history: History) -> Iterator[Finding]:
    """Reports a jump of the loss in the first steps, even if it came down again."""
    name = expected.training_loss(history)
    loss = expected.metric(history, name)
    if len(loss) < MIN_POINTS:
        return
    end = max(expected.settled_after(history) + EARLY_STEPS, loss.steps[MIN_POINTS - 1])
    early = loss[loss.steps <= end]
    values, lowest = early.values, np.minimum.accumulate(early.values)
    rises = values - lowest
    # Noise may be of one size in all steps, or a share of the loss, which is high at first.
    limit = np.maximum(JUMP, _relative_noise(loss)) * lowest
    jumps = rises > np.maximum(SPIKE_SIGMAS * robust.noise(loss.values), limit)
    # What is left at the next log step.
    stays = np.minimum(values[:-1], values[1:]) - lowest[:-1]
    found = jumps[:-1] & (stays >= JUMP_STAYS * lowest[:-1])
    if not found.any():
        found = jumps
        if not _is_no_batch(history, early, found):
            return
    top = int(np.flatnonzero(found)[np.argmax(rises[: len(found)][found])])
    evidence = f"{name} was {lowest[top]:.4g}, then {values[top]:.4g} at step {early.steps[top]}"
    evidence += f", and is {robust.tail(loss):.4g} at step {loss.steps[-1]}."
    stable_until = float(early.steps[int(np.argmin(values[: top + 1]))])
    causes = expected.instability_causes(history, stable_until)[:2]
    title, steps = "the loss jumped in the first steps", robust.span(early[: top + 1])
    yield Finding(
        "early_loss_jump", "warning", "likely", title, evidence, causes, steps, (), ("loss_spikes",)
    )


def _relative_noise(loss: Series) -> float:
    """Returns how far noise reaches above a loss, as a share of it; it may fall with the loss."""
    positive = loss.values[loss.values > 0]
    return math.expm1(SPIKE_SIGMAS * robust.noise(np.log(positive)))


def _is_no_batch(history: History, early: Series, found: np.ndarray) -> bool:
    """Returns whether rises that have disappeared at the next log step come from the training
    steps, and not from one unusual batch each: the learning rate is far above the usual one, or the
    batch's loss would be too high for a language model. A log step has the mean over all steps
    since the one before, so that a batch must be as many times higher."""
    if not found.any():
        return False
    if expected.rate_is_high(history):
        return True
    untrained = max(math.log(history.fact("model.vocab_size") or 1), float(early.values[0]))
    highest = (CONFIDENT if history.key("model.pretrained") else 1 + JUMP) * untrained
    lowest, steps = np.minimum.accumulate(early.values), np.diff(early.steps, prepend=0)
    of_one_batch = (lowest + steps * (early.values - lowest))[found]
    return bool(history.fact("model.vocab_size")) and float(of_one_batch.max()) > highest


def loss_spikes(history: History) -> Iterator[Finding]:
    """Reports single log steps whose loss is far above their neighbours."""
    name = expected.training_loss(history)
    loss = expected.settled(history, name)
    if len(loss) < 2 * WIDTH:
        return
    usual = robust.running_median(loss.values, WIDTH)
    above = loss.values - usual
    found = above > np.maximum(SPIKE_SIGMAS * robust.noise(above), SPIKE_SHARE * usual)
    num_spikes = int(np.sum(found & ~np.roll(found, 1)))  # neighbouring entries are one spike
    if num_spikes < 2:
        return
    spikes = loss[found]
    worst = int(np.argmax(spikes.values))
    causes = expected.instability_causes(history)
    # The loss recovers at the next log step: the weights were not damaged, so the samples were.
    if num_spikes > ISOLATED * found.sum() and not expected.rate_is_high(history):
        causes = [causes[-1], *causes[:-1]]
    evidence = (
        f"{num_spikes} spikes; the highest is {spikes.values[worst]:.4g} at step"
        f" {spikes.steps[worst]}"
    )
    evidence += f", where {usual[found][worst]:.4g} was usual."
    title, steps = "the loss has spikes", robust.span(spikes)
    yield Finding("loss_spikes", "warning", "likely", title, evidence, causes, steps)


def loss_not_decreasing(history: History) -> Iterator[Finding]:
    """Reports that the loss of an untrained model does not decrease."""
    name, vocab_size = expected.training_loss(history), history.fact("model.vocab_size")
    loss = expected.metric(history, name)
    if len(loss) < MIN_POINTS or len(expected.settled(history, name)) < 3:
        return
    first, last = float(loss.values[0]), robust.tail(loss)
    uniform = math.log(vocab_size or 1)
    is_trained = first < UNTRAINED * uniform or history.key("model.pretrained")
    if is_trained or abs(first - last) > NO_DECREASE * first:
        return
    evidence = (
        f"{name} was {first:.4g} at step {loss.steps[0]} and is {last:.4g} at step {loss.steps[-1]}"
    )
    if uniform:
        evidence += f"; ln(vocabulary) is {uniform:.4g}"
    confidence = "certain" if first - last < NO_DECREASE / 3 * first else "likely"
    causes, steps = list(why_not_decreasing(history)), robust.span(loss)
    title = "the loss does not decrease"
    level: Level = "error" if history.is_text else "warning"  # a fine-tuned module's may be low
    explains = ("no_better_than_unigram",)
    yield Finding(
        "loss_not_decreasing",
        level,
        confidence,
        title,
        f"{evidence}.",
        causes,
        steps,
        explains=explains,
    )


def why_not_decreasing(history: History) -> Iterator[Cause]:
    """Yields what is known from the facts first, then what the metrics suggest."""
    total = history.fact("parameters.total", 0)
    trainable = history.fact("parameters.trainable", 0)
    norms, rates = (
        expected.metric(history, "train/grad_norm"),
        expected.metric(history, "train/learning_rate"),
    )
    now, usual = expected.peak_rate(history), robust.rounded(expected.usual_rate(history))
    # AdamW moves a weight by at most the learning rate in each step.
    moved = float((rates.values * np.diff(rates.steps, prepend=0)).sum())
    if total and trainable < total / 2 and not history.key("model.adapter"):
        yield Cause(
            f"{1 - trainable / total:.1%} of the parameters are frozen ({trainable:,} of {total:,}"
            " are trained): look for requires_grad_(False) in module.py."
        )
    if len(norms) and not robust.tail(norms):
        yield Cause("The gradient is 0: look for .detach() and no_grad in module.py.")
    elif expected.is_adam(history) and len(rates) and moved < expected.WEIGHT / 10:
        sentence = (
            "The learning rate is too low: all steps together can move a weight by at most"
            f" {moved:.1g}"
        )
        higher = [Change("model.optim.learning_rate", now, usual)] if 0 < now < usual else []
        yield Cause(f"{sentence}; initial weights are around {expected.WEIGHT}.", higher)
    elif expected.rate_is_high(history):
        compared = f"{now:.2g}, where {usual:.1g} is usual"
        sentence = (
            f"The learning rate is too high: {compared}; the first steps destroyed the initial"
            " weights."
        )
        yield Cause(sentence, expected.lower_rate(history))
    likely = "shift, tokenizer, shuffled labels"
    if not history.is_text:
        likely = "shuffled labels, wrong columns, inputs without a scale"
    yield Cause(f"The labels do not match the inputs: inspect a batch ({likely}).")


def labels_masked(history: History) -> Iterator[Finding]:
    """A loss of exactly 0 is a sum over no labels."""
    name = expected.training_loss(history)
    loss = expected.metric(history, name)
    if len(loss) < 3 or robust.median(abs(loss.values)):
        return
    title, explains = "no label counts", ("loss_not_decreasing", "too_good_to_be_true")
    if not history.is_text:
        causes = [
            Cause("training_step returns a constant: a mask, weight or coefficient is 0."),
            Cause("All targets are equal, or part of the input: inspect a batch."),
        ]
        yield Finding(
            "labels_masked",
            "error",
            "likely",
            "the loss is 0",
            f"{name} is 0 in most log steps.",
            causes,
            robust.span(loss),
            explains=explains,
        )
        return
    longer = []
    if length := history.key("data.seq_len"):
        longer.append(Change("data.seq_len", length, 2 * length))
    causes = [
        Cause("The mask covers the answers too: data.py sets labels to -100 where it should not."),
        Cause("The markers of the chat template were not found: all text is masked as the prompt."),
        Cause("seq_len truncates the answers.", longer),
    ]
    yield Finding(
        "labels_masked", "error", "certain", title, "The loss is 0.", causes, explains=explains
    )


def loss_oscillates(history: History) -> Iterator[Finding]:
    """Reports a loss that goes up and down between log steps, and does not fall."""
    name = expected.training_loss(history)
    loss = expected.settled(history, name)
    if len(loss) < 2 * WIDTH:
        return
    usual, swing = robust.median(loss.values), robust.noise(loss.values)
    fell = robust.head(loss) - robust.tail(loss)
    if usual < MIN_LOSS or swing < SWINGS * usual or fell > swing:
        return
    first = expected.metric(history, name).values[0]
    evidence = (
        f"{name} swings by {swing:.2g} around {usual:.4g} between log steps, and its median"
        f" does not fall (first value: {first:.4g})."
    )
    lower = expected.lower_rate(history)
    causes = [Cause("The learning rate is too high: steps jump over the minimum.", lower)]
    tokens = history.fact("data.tokens_per_step")
    size = history.key("data.global_batch_size")
    if isinstance(size, int) and (not tokens or tokens < USUAL_TOKENS):
        few = f"An optimizer step has few samples ({size} sequences"
        few += f", {tokens:,} tokens)" if tokens else ")"
        larger = Change("data.global_batch_size", size, 4 * size)
        causes.append(Cause(f"{few}: a larger batch has less noise.", [larger]))
    causes += expected.not_clipped(history)
    title, steps = "the loss oscillates", robust.span(loss)
    explains = ("loss_spikes", "early_loss_jump")
    yield Finding(
        "loss_oscillates", "warning", "likely", title, evidence, causes, steps, (), explains
    )
