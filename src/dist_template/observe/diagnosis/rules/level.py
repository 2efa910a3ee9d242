"""What the loss's level tells: it begins too high, stays where it began or at what frequencies tell, or is too good."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...history.metrics import Series
from ...history.run import History
from .. import expected, robust
from ..causes import too_hot
from ..engine import rule
from ..finding import Cause, Change, Finding

MIN_POINTS = 6  # log steps; fewer show no trend
STANDS_STILL = 0.03  # of the loss: any sensible rate takes more off an untrained model's in its first steps
UNTRAINED = 0.8  # of ln(vocabulary): a loss above it is one of a model that knows next to nothing
TOO_HIGH = 1.3  # times ln(vocabulary): surer of the wrong tokens than one that knows nothing
AT_UNIGRAM = 0.04  # of the unigram model's loss
HALF, MIN_HALF = 0.5, 15  # of the training, and log steps, that a loss must stay there: every run passes by
TOO_GOOD_BITS = 0.3  # per byte of unseen text; the best models need 0.5 and more


def _loss(history: History) -> Series:
    return history.metrics["train/loss"].finite()


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
    if not untrained or fall > STANDS_STILL * begins or fall < -STANDS_STILL * begins:
        return
    causes = list(_why_it_stands(history))
    yield Finding(
        "loss_stands_still", "error", "certain" if fall < STANDS_STILL / 3 * begins else "likely",
        "the loss does not fall",
        f"train/loss was {begins:.4g} at step {loss.steps[0]} and is {robust.tail(loss):.4g} at step {loss.steps[-1]}"
        + (f"; a model that knows nothing has {uniform:.4g}, ln(vocabulary)." if uniform else "."),
        causes,
        steps=robust.span(loss),
    )  # fmt: skip


def _why_it_stands(history: History) -> Iterator[Cause]:
    """The likeliest first: what is known to be so, then what the numbers suggest."""
    norm = history.metrics["train/grad_norm"].finite()
    total, trainable = history.fact("parameters.total", 0), history.fact("parameters.trainable", 0)
    now, usual = expected.peak_rate(history), expected.usual_rate(history)
    if total and trainable < total / 2:
        yield Cause(
            f"{1 - trainable / total:.1%} of the parameters are frozen ({trainable:,} of {total:,} are trained): look "
            "for requires_grad_(False) in module.py."
        )
    if len(norm) and robust.median(norm.values) == 0:
        yield Cause("The gradient is zero: nothing joins the loss to the parameters (a .detach(), no_grad, a mask).")
    if expected.rate_is_low(history):
        yield Cause(
            f"The learning rate is too low: all steps together can have moved a weight by "
            f"{expected.travel(history):.1g}, and weights begin around {expected.WEIGHT}.",
            expected.higher_rate(history),
        )
    elif expected.rate_is_high(history):
        yield Cause(
            f"The learning rate is too high: {now:.2g} where {usual:.1g} is usual; it has destroyed the start.",
            expected.lower_rate(history),
        )
    yield Cause("The labels have nothing to do with the inputs: look at a batch (shift, tokenizer, shuffled labels).")
    if not expected.rate_is_low(history) and not expected.rate_is_high(history):
        yield Cause("The learning rate does not suit the model.", expected.higher_rate(history))


@rule
def loss_starts_too_high(history: History) -> Iterator[Finding]:
    """Worse than knowing nothing: weights too large, or weights of another tokenizer."""
    loss, uniform = _loss(history), expected.uniform_loss(history)
    if not len(loss) or not uniform or loss.steps[0] > expected.settled_after(history) or loss.values[0] < uniform:
        return
    begins, pretrained = float(loss.values[0]), not expected.is_from_scratch(history)
    if begins < TOO_HIGH * uniform and not pretrained:
        return
    wide = history.key("model.architecture.initializer_range")
    narrow = [Change("model.architecture.initializer_range", wide, expected.WEIGHT)]
    range_ = Cause("Weights begin too large.", narrow if wide and wide > expected.WEIGHT else [])
    other = _other_tokenizer(history) if pretrained else None
    yield Finding(
        "loss_starts_too_high", "error" if pretrained else "warning", "likely",
        "the loss begins higher than that of a model that knows nothing",
        f"train/loss was {begins:.4g} at step {loss.steps[0]}; ln(vocabulary) is {uniform:.4g}.",
        [other or range_, Cause("Labels and inputs do not belong together (data.py).")],
        steps=robust.span(loss[:1]), explains=("loss_jumped_at_the_start", "clips_most_steps"),
    )  # fmt: skip


def _other_tokenizer(history: History) -> Cause:
    """The tokenizer, unless it is the one that is stored with the weights: then whether the two belong together."""
    kind, path, weights = (history.key(k) for k in ("data.tokenizer", "data.tokenizer.path", "model.pretrained"))
    if path and os.path.normpath(path) == os.path.normpath(weights):
        return Cause(f"The tokenizer that is stored in {path} is not the one that these weights were trained with.")
    kind = str(kind.get("class_path", "")).rsplit(".", 1)[-1] if isinstance(kind, dict) else None
    changes = [Change("data.tokenizer", kind, "Pretrained")] if kind not in (None, "Pretrained") else []
    changes.append(Change("data.tokenizer.path", path, weights))
    return Cause("The tokenizer is not the one that the weights were trained with.", changes)


@rule
def loss_knows_frequencies(history: History) -> Iterator[Finding]:
    """It stays where a model is that knows how often each token occurs, and nothing else."""
    loss, unigram = _loss(history), expected.unigram_loss(history)
    if not unigram or not len(loss) or not expected.is_from_scratch(history):
        return
    late = robust.later(loss, max(HALF * loss.steps[-1], expected.settled_after(history)))
    if len(late) < MIN_HALF or abs(robust.tail(late) / unigram - 1) > AT_UNIGRAM:
        return
    if abs(robust.head(late) / robust.tail(late) - 1) > AT_UNIGRAM:
        return
    low = expected.rate_is_low(history)
    rate = [Cause("The learning rate is too low.", expected.higher_rate(history))] if low else too_hot(history, 0)[:1]
    context = Cause("The model does not see earlier tokens: look at its attention mask and its positions.")
    yield Finding(
        "loss_knows_frequencies", "warning", "likely", "the model has learned how often tokens occur, and nothing else",
        f"train/loss is {robust.tail(late):.4g} since step {late.steps[0]}; a unigram model has {unigram:.4g}.",
        [*rate, context] if low or expected.rate_is_high(history) else [context, *rate],
        steps=robust.span(late),
    )  # fmt: skip


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
        "loss_too_good", "info", "possible", "the validation loss is too good to be true",
        f"eval/bits_per_byte is {bits.last:.3g} at step {bits.steps[-1]}; the best models need 0.5 and more.",
        [same, leak, dull] if share else [leak, dull, same],
        steps=robust.span(bits[-1:]),
    )  # fmt: skip
