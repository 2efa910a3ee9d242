"""Rules about the data, as inspected before training (facts.json) and during training."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ....observe.history.run import History
from .. import expected, robust
from ..finding import Cause, Change, Finding

FEW_LABELS = 0.05  # share of the labels; instruction data with long prompts have a tenth and more
FEW_TOKENS = 4  # distinct token ids
OVERLAP = 0.01  # of the validation split: above, the validation loss does not measure unseen text
UNSHIFTED = 0.8  # of the labels; at most a tenth of the tokens of a text repeat the one before
MIN_VALIDATIONS = 4
OVERFIT_RISE = 0.02  # of the best validation loss
FIRST_RISE = 0.1  # above the first of few validations, which no healthy training reaches


def labels_masked(history: History) -> Iterator[Finding]:
    counted = expected.metric(history, "data/counted_share")
    loss = expected.metric(history, "train/loss")
    share = robust.median(counted.values) if len(counted) else history.fact("data.counted_share")
    if share is None and len(loss) >= 3 and not robust.median(abs(loss.values)):
        share = 0.0  # a loss of exactly 0 is a sum over no labels
    if share is None or share >= FEW_LABELS:
        return
    length = history.key("data.seq_len")
    longer = []
    if length:
        longer.append(Change("data.seq_len", length, 2 * length))
    causes = [
        Cause("The mask covers the answers too: data.py sets labels to -100 where it should not."),
        Cause("The markers of the chat template were not found: all text is masked as the prompt."),
        Cause("seq_len truncates the answers.", longer),
    ]
    evidence = f"{share:.2%} of the labels are not -100"
    if len(loss):
        evidence += f"; train/loss is {loss.last:.4g}"
    level, confidence, title = "error", "certain", "no label counts"
    if share:
        level, confidence, title = "warning", "likely", "few labels count"
    steps, evidence = robust.span(counted) if len(counted) else None, f"{evidence}."
    explains = ("gradient_zero", "loss_not_decreasing")
    yield Finding("labels_masked", level, confidence, title, evidence, causes, steps, (), explains)


def labels_not_shifted(history: History) -> Iterator[Finding]:
    """Reports labels that equal the input token at the same position."""
    share = history.fact("data.unshifted_share")
    if not share or share < UNSHIFTED:
        return
    title = "labels repeat the inputs"
    evidence = f"{share:.0%} of the labels equal the input token at the same position."
    shift = "labels[:, t] = tokens[:, t + 1] (text/batches/rows.py)"
    cause = Cause(f"Labels must be the inputs shifted by one: {shift}.")
    yield Finding("labels_not_shifted", "error", "certain", title, evidence, [cause])


def data_constant(history: History) -> Iterator[Finding]:
    shares = expected.metric(history, "data/distinct_token_share")
    distinct = history.fact("data.distinct_tokens")
    size = (history.key("data.micro_batch_size") or 0) * (history.key("data.seq_len") or 0)
    in_batch = robust.median(shares.values) * size if len(shares) else math.inf
    if distinct is not None and distinct <= FEW_TOKENS:
        evidence = f"The inspected rows have {distinct} distinct tokens."
    elif in_batch <= FEW_TOKENS:
        evidence = f"A micro-batch of {size} tokens has {in_batch:.0f} distinct tokens."
    else:
        return
    causes = [
        Cause("The source yields one text, or the tokenizer maps everything to <unk>."),
        Cause("Rows are filled with padding."),
    ]
    title, explains = "the data are constant", ("train_validation_overlap", "loss_not_decreasing")
    yield Finding("data_constant", "error", "certain", title, evidence, causes, None, (), explains)


def train_validation_overlap(history: History) -> Iterator[Finding]:
    share = history.fact("data.duplicate_share")
    if not share or share <= OVERLAP:
        return
    evidence = f"{share:.1%} of the inspected validation text is also in the train split."
    cause = Cause(
        "Near-duplicate documents: only equal documents are assigned to the same split. Remove"
        " near-duplicates before `prepare`."
    )
    level, title = "error" if share > 0.5 else "warning", "validation text is in the train split"
    yield Finding("train_validation_overlap", level, "certain", title, evidence, [cause])


def overfits(history: History) -> Iterator[Finding]:
    """Reports a validation loss that rises while the training loss falls."""
    loss = expected.metric(history, "train/loss")
    every = expected.metric(history, "eval/loss")
    validation = robust.later(every, 0)  # no checkpoint is kept of the one before training
    is_worse = False
    if 0 < len(validation) < MIN_VALIDATIONS:
        is_worse = every.last > (1 + FIRST_RISE) * every.values[0]
        validation = every
    is_short = len(validation) < MIN_VALIDATIONS and not is_worse
    if is_short or len(loss) < MIN_VALIDATIONS or history.key("data.repeat_first_batch"):
        return  # repeat_first_batch overfits on purpose
    best = int(np.argmin(validation.values))
    since, lowest = validation[best:], float(validation.values[best])
    step, last_step = robust.span(since)
    rise = validation.last / lowest - 1
    noise = robust.noise(validation.values[: best + 1]) / lowest if best > 2 else 0.0
    is_few = len(since) < 3 and not is_worse
    if is_few or rise < max(OVERFIT_RISE, 3 * noise) or robust.rising_share(since) < 0.7:
        return
    before = loss[loss.steps <= max(step, int(loss.steps[0]))]
    if not len(before) or robust.tail(loss) >= robust.tail(before):
        return  # both rise: training diverges
    tokens, size = expected.metric(history, "train/tokens"), history.fact("data.train_tokens")
    epochs = tokens.last / size if len(tokens) and size else 0.0
    steps, decay = expected.max_steps(history), history.key("model.optim.weight_decay")
    stop = [Change("config", None, "configs/preset/early_stopping.yaml")]
    best_kept = "nothing was learned that holds for other data: use more data, or a smaller model."
    if step:
        now = int(steps) if math.isfinite(steps) else None
        stop.insert(0, Change("trainer.max_steps", now, step))
        best_kept = f"stop there (best-step{step} is kept)."
    causes = [Cause(f"The validation loss is lowest at step {step}: {best_kept}", stop)]
    if epochs > 2:
        more = "use more data, or a smaller model."
        causes.append(Cause(f"Each token was seen {epochs:.1f} times: {more}"))
    if decay is not None:
        more_decay = Change("model.optim.weight_decay", decay, min(max(0.1, 3 * decay), 0.3))
        causes.append(Cause("The regularization is too weak.", [more_decay]))
    evidence = (
        f"eval/loss was {lowest:.4g} at step {step} and is {validation.last:.4g} at step"
        f" {last_step}, while train/loss fell from {robust.tail(before):.4g} to"
        f" {robust.tail(loss):.4g}."
    )
    confidence, title = "certain" if rise > 5 * OVERFIT_RISE else "likely", "the model overfits"
    yield Finding("overfits", "warning", confidence, title, evidence, causes, (step, last_step))
