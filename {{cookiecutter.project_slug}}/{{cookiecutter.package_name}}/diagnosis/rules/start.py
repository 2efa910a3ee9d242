"""What the first loss tells, before training has changed anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...history.run import History
from .. import expected
from ..engine import rule
from ..finding import Cause, Change, Finding

TOO_HIGH = 1.2  # times ln(vocabulary); logits of deviation 1 begin 0.5 nats above it, which is a tenth of 5
INITIALIZER_RANGE = 0.02  # transformers' default for nearly every architecture, GPT-2's before it


@rule
def loss_starts_too_high(history: History) -> Iterator[Finding]:
    """A model that guesses has ln(vocabulary); one that begins above it is sure of what is wrong."""
    loss, uniform = history.metrics["train/loss"].finite(), expected.uniform_loss(history)
    if not len(loss) or not uniform or loss.values[0] <= TOO_HIGH * uniform:
        return
    if loss.steps[0] > 2 and expected.rate_is_high(history):
        return  # the mean over its first steps, which that rate may have spoilt
    scratch = expected.is_from_scratch(history)
    yield Finding(
        "loss_starts_too_high",
        "warning" if scratch else "error",
        "certain",
        "the loss begins above that of a guess",
        f"train/loss is {loss.values[0]:.4g} at step {loss.steps[0]}; who knows nothing has {uniform:.4g}, "
        "ln(vocabulary).",
        _of_weights(history) if scratch else _of_tokenizer(history),
        steps=(int(loss.steps[0]), int(loss.steps[0])),
        explains=("gradient_explodes", "clips_most_steps"),
    )


def _of_weights(history: History) -> list[Cause]:
    now: Any = (history.key("model.architecture") or {}).get("initializer_range")
    wide = isinstance(now, int | float) and now > INITIALIZER_RANGE
    to = Change("model.architecture.initializer_range", now, INITIALIZER_RANGE)
    return [
        Cause("The weights begin too large, and with them the logits.", [to] if wide else []),
        Cause("A scale is missing or wrong in the model: of the embeddings, of the attention, of the logits."),
    ]


def _of_tokenizer(history: History) -> list[Cause]:
    weights, path = history.key("model.pretrained"), history.key("data.tokenizer.path")
    kind = [] if path else [Change("data.tokenizer", history.key("data.tokenizer.class_path"), "Pretrained")]
    own = [*kind, Change("data.tokenizer.path", path, weights)] if path != weights else []
    return [
        Cause("The text was not tokenized by the tokenizer that the weights were trained with.", own),
        Cause("Weights did not load: they are named differently from what the architecture expects."),
    ]
