"""Rules about labels that do not count, and about overfitting."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....observe.history.run import History
from .. import expected, robust
from ..finding import Cause, Change, Finding

FEW_LABELS = 0.05  # share of the labels; instruction data with long prompts have a tenth and more
MIN_VALIDATIONS = 4
OVERFIT_RISE = 0.02  # of the best validation loss


def labels_masked(history: History) -> Iterator[Finding]:
    counted = expected.metric(history, "data/counted_share")
    loss = expected.metric(history, "train/loss")
    share = robust.median(counted.values)  # NaN without values
    if len(loss) >= 3 and not robust.median(abs(loss.values)):
        share = 0.0  # a loss of exactly 0 is a sum over no labels
    if not share < FEW_LABELS:
        return
    longer = []
    if length := history.key("data.seq_len"):
        longer.append(Change("data.seq_len", length, 2 * length))
    causes = [
        Cause("The mask covers the answers too: data.py sets labels to -100 where it should not."),
        Cause("The markers of the chat template were not found: all text is masked as the prompt."),
        Cause("seq_len truncates the answers.", longer),
    ]
    evidence, explains = f"{share:.2%} of the labels are not -100.", ("loss_not_decreasing",)
    level, title = ("warning", "few labels count") if share else ("error", "no label counts")
    yield Finding("labels_masked", level, "certain", title, evidence, causes, explains=explains)


def overfits(history: History) -> Iterator[Finding]:
    """Reports a validation loss that rises while the training loss falls."""
    loss = expected.metric(history, "train/loss")
    validation = expected.metric(history, "eval/loss")
    validation = validation[validation.steps > 0]  # no checkpoint is kept of the one before training
    if min(len(validation), len(loss)) < MIN_VALIDATIONS or history.key("data.repeat_first_batch"):
        return  # repeat_first_batch overfits on purpose
    best = int(np.argmin(validation.values))
    since, lowest = validation[best:], float(validation.values[best])
    step, last_step = robust.span(since)
    rise = validation.last / lowest - 1
    noise = robust.noise(validation.values[: best + 1]) / lowest if best > 2 else 0.0
    if len(since) < 3 or rise < max(OVERFIT_RISE, 3 * noise) or robust.rising_share(since) < 0.7:
        return
    then, now = robust.tail(loss[loss.steps <= max(step, int(loss.steps[0]))]), robust.tail(loss)
    if now >= then:
        return  # both rise: training diverges
    stop = [Change("trainer.max_steps", history.key("trainer.max_steps"), step)]
    stop.append(Change("config", None, "configs/preset/early_stopping.yaml"))
    best_kept = f"stop there (best-step{step} is kept)."
    causes = [Cause(f"The validation loss is lowest at step {step}: {best_kept}", stop)]
    causes.append(Cause("The model is too large for so few data, or is trained on them too often."))
    evidence = f"eval/loss was {lowest:.4g} at step {step} and is {validation.last:.4g} at step {last_step}"
    evidence += f", while train/loss fell from {then:.4g} to {now:.4g}."
    confidence, title = "certain" if rise > 5 * OVERFIT_RISE else "likely", "the model overfits"
    yield Finding("overfits", "warning", confidence, title, evidence, causes, (step, last_step))
