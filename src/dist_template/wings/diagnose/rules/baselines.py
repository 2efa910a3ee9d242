"""Rules that compare the loss of a language model with what predictors without a model reach.

The token cache has the predictors' figures (text/cache/baselines.py), facts.json those of the run's
own data. Pairs, other data modules and caches of earlier versions have none: no rule applies."""

import math
from collections.abc import Iterator

import numpy as np

from ...history import History, Series
from .. import expected, robust
from ..finding import Cause, Change, Confidence, Finding
from .loss import loss_diverges, why_not_decreasing

MARGIN = 0.03  # of the unigram model's loss: a model that has learned only frequencies is within
CERTAIN = 0.01  # of it
MIN_UNIGRAM = 0.1  # nats per label; below, the labels are nearly all equal
BETTER = 0.05  # of the labels, more than the unigram model predicts: then the model has learned
MIN_POINTS = 3  # log steps that are compared
LATE = 0.75  # of the steps so far: the log steps after it are compared, or the last ones
FALLS = 0.01  # of the loss, from the third to the last quarter of the steps: it is decreasing
# Steps after the warm-up. Healthy models may stay at this loss for a while before they leave it: of
# 20 seeds of two blocks, until step 80; GPT-2 (124M, batches of 0.5M tokens) until 200.
ENOUGH_AT_END = 80  # when the training has ended, and its loss had stopped to decrease before
# Else: at least the first, then half of the planned steps, at most the second; the last where the
# loss still decreases, as with a low learning rate.
ENOUGH, ENOUGH_FLAT, ENOUGH_FALLING = 200, 500, 2000
ENOUGH_PRETRAINED = 20  # it starts better than a unigram model
AT_END = 0.95  # of the planned steps: the training ends
SHORT = 1000  # steps after the warm-up: with fewer, a longer training is proposed
READ = 100  # labels, for each of the exp(loss) tokens that a unigram model hesitates among
# Of the unigram model's loss that bzip2 needs for few letters, with losses below the second: there
# is little to learn in DNA, of which models know 5 %, and nothing in random numbers.
RANDOM, LETTERS = 0.9, 3.5
LONGER = 4  # times as many steps are proposed
LOW_RATE = 3  # times lower than usual


def no_better_than_unigram(history: History) -> Iterator[Finding]:
    """Reports a loss that, after enough steps, is no lower than that of a model that knows only how
    often each token occurs."""
    unigram = history.fact("data.unigram_loss") or 0.0
    loss = expected.metric(history, expected.TRAINING)
    trained = loss[loss.steps > _warmup(history)]
    if unigram < MIN_UNIGRAM or len(trained) < MIN_POINTS or _is_random(history, unigram):
        return
    num_late = int(np.sum(trained.steps > LATE * expected.last_step(history)))
    late = trained[-max(MIN_POINTS, num_late) :]
    now = robust.median(late.values)
    # Above it, or on the way down, a model may not know the frequencies yet.
    highest = (1 + MARGIN) * unigram + _entropy_of_sources(history)
    is_plateau = now < highest and not _is_falling(loss)
    if (
        now < (1 - MARGIN) * unigram
        or not _has_read_enough(history, unigram)
        or late.steps[-1] < _enough_steps(history, is_plateau)
        or _is_better_elsewhere(history, unigram)
        or any(loss_diverges(history))  # it has been better
    ):
        return
    first, last = robust.span(late)
    evidence = f"{expected.TRAINING} is {now:.4g} in steps {first} to {last}"
    evidence += f" (first value: {loss.values[0]:.4g}); a model that knows only how often each"
    evidence += f" token occurs has {unigram:.4g}."
    is_equal = is_plateau and now > (1 - CERTAIN) * unigram
    confidence: Confidence = "certain" if is_equal else "likely"
    title = "the model is no better than token frequencies"
    explains = ("early_loss_jump", "loss_spikes", "loss_oscillates")
    explains += ("experts_unused", "experts_overloaded")
    starts_bad = float(loss.values[0]) > unigram
    causes = list(_why_no_better(history, is_plateau, starts_bad))
    yield Finding(
        "no_better_than_unigram",
        "error",
        confidence,
        title,
        evidence,
        causes,
        (first, last),
        explains=explains,
    )


def _warmup(history: History) -> float:
    """Returns the last step of the warm-up, which is at most the training's."""
    return min(expected.warmup_steps(history), expected.max_steps(history))


def _is_falling(loss: Series) -> bool:
    """Returns whether the loss still decreased in the second half of the steps so far, by more than
    its noise."""
    half = loss[loss.steps > loss.steps[-1] / 2]
    if len(half) < 4:
        return True
    before, after = half[: len(half) // 2].values, half[len(half) // 2 :].values
    fall = robust.median(before) - robust.median(after)
    # A median of n values has 1.25 times the error of their mean.
    error = 1.25 * robust.noise(half.values) * math.sqrt(2 / len(before))
    return fall > max(FALLS * robust.median(before), 2 * error)


def _entropy_of_sources(history: History) -> float:
    """Returns what shuffled labels of a mixture cost more, at most: the source is unknown then."""
    weights = history.key("data.source.weights")
    given = [*weights.values()] if isinstance(weights, dict) else []
    shares = [each / sum(given) for each in given if isinstance(each, int | float) and each > 0]
    return -sum(share * math.log(share) for share in shares)


def _enough_steps(history: History, is_plateau: bool) -> float:
    """Returns the step from which a model must be better."""
    planned, warmup = expected.max_steps(history), _warmup(history)
    if history.key("model.pretrained"):
        return warmup + ENOUGH_PRETRAINED
    has_ended = expected.last_step(history) >= AT_END * planned
    if has_ended and (is_plateau or expected.rate_is_high(history)):
        return warmup + ENOUGH_AT_END
    most = ENOUGH_FLAT if is_plateau else ENOUGH_FALLING
    return warmup + max(ENOUGH, min(most, planned / 2))


def _is_random(history: History, unigram: float) -> bool:
    """Returns whether the labels are letters that hardly depend on the ones before."""
    compressed = history.fact("data.compressed_loss") or 0.0
    return unigram < LETTERS and compressed > RANDOM * unigram


def _has_read_enough(history: History, unigram: float) -> bool:
    """Returns whether the model can know the frequencies: exp(loss) is the number of equally
    frequent tokens with that loss."""
    tokens = expected.metric(history, "train/tokens")
    if len(tokens):
        read = tokens.last
    else:
        read = (history.fact("data.tokens_per_step") or 0) * expected.last_step(history)
    labels = read * (history.fact("data.labels_per_token") or 1.0)
    return labels >= READ * math.exp(unigram)


def _is_better_elsewhere(history: History, unigram: float) -> bool:
    """Returns whether accuracy or validation say that the model is better: the loss is then of
    another kind (a term was added, it has another scale), or training is made harder on purpose."""
    base = history.fact("data.unigram_accuracy") or 0.0
    accuracy = expected.metric(history, expected.ACCURACY)
    validated = expected.metric(history, expected.VALIDATION)
    return (len(accuracy) > 0 and robust.tail(accuracy) > base + BETTER) or (
        len(validated) > 0
        and validated.steps[-1] > 0
        and validated.last < (1 - 2 * MARGIN) * unigram
    )


def _why_no_better(history: History, is_plateau: bool, starts_bad: bool) -> Iterator[Cause]:
    now, usual = expected.peak_rate(history), robust.rounded(expected.usual_rate(history))
    of_objective = history.fact("objective.no_better")
    if of_objective:
        yield Cause(of_objective)
    if not is_plateau and expected.is_adam(history) and 0 < now < usual / LOW_RATE:
        yield Cause(
            f"The learning rate is too low: {now:.2g}, where {usual:.1g} is usual.",
            [Change("model.optim.learning_rate", now, usual)],
        )
    pretrained = history.key("model.pretrained")
    if pretrained and starts_bad and not expected.rate_is_high(history):
        yield Cause(
            f"The weights of {pretrained} were learned with another tokenizer or chat template than"
            " data.tokenizer and data.source have."
        )
    yield from why_not_decreasing(history)
    yield Cause(
        "The model does not use what is before a token: inspect position_ids, the attention mask"
        " and the inputs in module.py."
    )
    steps = expected.last_step(history)
    if steps - _warmup(history) < SHORT and not expected.rate_is_high(history):
        longer = Change("trainer.max_steps", history.key("trainer.max_steps"), LONGER * steps)
        yield Cause(
            "The training is too short: models stay at this loss for a while, then leave it.",
            [longer],
        )


# Of what bzip2 needs: in FEW_STEPS, healthy models come to 1.2; and of answers to prompts.
PERFECT, PERFECT_ANSWERS = 0.25, 0.05
PERFECT_ACCURACY = 0.97
VARIED_UNIGRAM = 1.0  # nats per label: below, few tokens are nearly all labels
VARIED = 0.1  # of the unigram's loss that bzip2 needs: below, texts are copies or a pattern
FEW_STEPS = 200  # after the warm-up: a leak is learned as fast as the frequencies are
FEW_STEPS_OF_ANSWERS = 100  # where prompts do not count, answers may follow from them: copies, sums
ALL_COUNT = 0.95  # of the tokens are labels: there are no prompts
PASSES = 4  # over the data: until then, a model does not know them by heart (arXiv:2305.16264)
KNOWN = 0.8  # of the unigram's loss: a model that starts below has been trained


def too_good_to_be_true(history: History) -> Iterator[Finding]:
    """Reports a loss near 0 of a model that has learned from scratch for few steps, on varied texts
    that it has not read often: its inputs contain the labels."""
    unigram = history.fact("data.unigram_loss") or 0.0
    compressed = history.fact("data.compressed_loss") or 0.0
    if (
        unigram < VARIED_UNIGRAM
        or compressed < VARIED * unigram
        or history.key("model.pretrained")
        or history.key("data.repeat_first_batch")
        or history.key("trainer.overfit_batches")
    ):
        return
    all_count = (history.fact("data.labels_per_token") or 1.0) > ALL_COUNT
    few, share = (FEW_STEPS, PERFECT) if all_count else (FEW_STEPS_OF_ANSWERS, PERFECT_ANSWERS)
    loss = expected.metric(history, expected.TRAINING)
    soon = loss[loss.steps <= _warmup(history) + few]
    limit = share * compressed
    since = _below_until_the_end(soon, limit)
    accuracy = expected.metric(history, expected.ACCURACY)
    accuracy = accuracy[(accuracy.steps >= since) & (accuracy.steps <= _warmup(history) + few)]
    if (
        since < 0
        or _has_been_trained(history, loss, KNOWN * unigram)
        or (len(accuracy) and robust.median(accuracy.values) < PERFECT_ACCURACY)
        or (_passes(history, since) > PASSES and not _is_validated(history, limit))
    ):
        return
    at = soon[soon.steps >= since]
    evidence = f"{expected.TRAINING} is {robust.median(at.values):.2g} from step {since} on"
    if len(accuracy):
        evidence += f" ({expected.ACCURACY} {robust.median(accuracy.values):.4g})"
    passes = _passes(history, since)
    evidence += f", after {passes:.2g} passes over the train split"
    if passes > PASSES:
        validated = expected.metric(history, expected.VALIDATION).last
        evidence += f", and {expected.VALIDATION} is {validated:.2g}"
    evidence += f". Of the same labels, bzip2 needs {compressed:.3g} nats each, and a model that"
    evidence += f" knows only how often each token occurs {unigram:.3g}."
    causes = [
        Cause(
            "The labels are the inputs: they are not shifted by one token. data.py must yield"
            " labels[t] = input_ids[t + 1]; inspect a batch."
        ),
        Cause(
            "Tokens attend to later ones: inspect the attention mask and what else module.py passes"
            " to the model."
        ),
        Cause("The answer is in the input: inspect a row's prompt, or text, for what it predicts."),
        Cause(
            "Nothing is wrong if the labels follow from what is before them by a rule that is"
            " learned in so few steps, as copies do."
        ),
    ]
    explains = ("loss_spikes", "loss_oscillates", "early_loss_jump")
    title, steps = "the loss is too good to be true", (since, int(at.steps[-1]))
    yield Finding(
        "too_good_to_be_true", "error", "likely", title, evidence, causes, steps, explains=explains
    )


def _below_until_the_end(loss: Series, limit: float) -> int:
    """Returns the step from which at least two log steps, and all until the end, are below a limit;
    -1: they are not."""
    above = np.flatnonzero(loss.values > limit)
    first = int(above[-1]) + 1 if len(above) else 0
    return int(loss.steps[first]) if len(loss) - first >= 2 else -1


def _has_been_trained(history: History, loss: Series, limit: float) -> bool:
    """Returns whether the model was better than untrained at the start, as when module.py loads
    weights; as far as it was measured."""
    validated = expected.metric(history, expected.VALIDATION)
    if len(validated) and not validated.steps[0]:
        return float(validated.values[0]) < limit
    return len(loss) > 0 and loss.steps[0] <= 2 and float(loss.values[0]) < limit


def _passes(history: History, step: int) -> float:
    """Returns how often the train split had been read at a step; of a mixture, the source that was
    read most."""
    passes = [expected.passes(history, step)]
    for name in history.metrics.names:
        if name.startswith("data/") and name.endswith("/epochs"):
            epochs = expected.metric(history, name)
            passes += epochs.values[epochs.steps <= step][-1:].tolist()
    return max(passes)


def _is_validated(history: History, limit: float) -> bool:
    """Returns whether the newest validation's loss is as low: the model does not know rows by
    heart."""
    validated = expected.metric(history, expected.VALIDATION)
    return len(validated) > 0 and validated.last < limit
