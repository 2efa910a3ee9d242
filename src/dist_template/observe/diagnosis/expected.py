"""What is usual for a run like this one: what the rules compare with, and the values they propose."""

from __future__ import annotations

import math

import numpy as np

from ..history.metrics import Series
from ..history.run import History
from . import robust
from .finding import Change

SETTLED_STEPS = 20  # after the warm-up; what comes before is a start, where loss and norms move by themselves
FINE_TUNING = 0.1  # of the rate from scratch: OpenAI's guide (2021) names 0.02 to 0.2 of the pre-training's
WARMUP_SHARE = 0.2  # of training at most
WEIGHT = 0.02  # what a weight is at the start: transformers' usual initializer_range
NOISY_TOKENS = 2000  # of an optimizer step: the loss of fewer differs by a tenth from batch to batch


def max_steps(history: History) -> float:
    """Optimizer steps of the whole training; inf where no end is set."""
    steps = history.fact("training.max_steps") or history.key("trainer.max_steps")
    return float(steps) if isinstance(steps, int | float) and steps > 0 else math.inf


def steady(history: History, name: str) -> Series:
    """Without what was measured first."""
    return history.metrics[name].finite()[1:]


def wait_s(history: History) -> np.ndarray:
    """(N,) seconds of a step that rank 0 waits for its next batch."""
    return steady(history, "perf/data_wait_share").values * robust.median(steady(history, "perf/step_s").values)


def running_s(history: History) -> float:
    """Seconds in which the run was not starting or waiting for a restart."""
    return sum(seconds for kind, seconds in history.goodput.items() if kind not in ("start", "restart"))


def epochs(history: History) -> float | None:
    """How often each token of the train split has been seen."""
    tokens, size = history.metrics["train/tokens"].finite(), history.fact("data.train_tokens")
    return tokens.last / size if len(tokens) and size else None


def last_step(history: History) -> int:
    loss = history.metrics["train/loss"]
    return int(loss.steps[-1]) if len(loss) else 0


def warmup_steps(history: History) -> float:
    warmup, steps = history.key("model.optim.warmup", 0) or 0, max_steps(history)
    return float(warmup) if warmup >= 1 else warmup * (steps if math.isfinite(steps) else 0)


def settled_after(history: History) -> float:
    """The step after which nothing is to be excused by the start; sooner in a training of few steps."""
    return warmup_steps(history) + min(SETTLED_STEPS, max_steps(history) / 5)


def is_from_scratch(history: History) -> bool:
    return not history.key("model.pretrained")


def uniform_loss(history: History) -> float | None:
    """Nats of a model that knows nothing: ln(vocabulary)."""
    size = history.fact("model.vocab_size")
    return math.log(size) if size else None


def unigram_loss(history: History) -> float | None:
    """Nats of a model that knows how often each token occurs, by the validation split; None before a validation."""
    bits, loss = history.fact("data.unigram_bits_per_byte"), history.metrics["eval/loss"].finite()
    measured = history.metrics["eval/bits_per_byte"].finite()
    if not bits or not len(loss) or not len(measured) or not measured.last:
        return None
    return bits * loss.last / measured.last


def usual_rate(history: History) -> float:
    """Peak learning rate of AdamW for a model of this size, of 10 M parameters where it is not known.

    0.003239 - 0.0001395 ln(N) for N parameters without embeddings (Kaplan et al., arXiv:2001.08361, appendix D.6), to
    be trusted within a factor of a few; a tenth of it from published weights.
    """
    num = max(history.fact("parameters.total", 1e7) - (history.fact("parameters.embedding") or 0), 1000)
    rate = max(0.003239 - 0.0001395 * math.log(num), 2e-5)  # the line ends at 10 B
    return rate * (1 if is_from_scratch(history) else FINE_TUNING)


def peak_rate(history: History) -> float | None:
    """What is configured, or what was seen."""
    rate = history.key("model.optim.learning_rate")
    seen = history.metrics["train/learning_rate"].finite()
    return float(rate) if rate else float(seen.values.max()) if len(seen) else None


def lower_rate(history: History, went_well_until: float | None = None) -> list[Change]:
    """A learning rate that would not do what this one did.

    Args:
        went_well_until: A step; if it lies in the warm-up, half of what the rate was then is proposed at most.
    """
    now, usual, rates = peak_rate(history), usual_rate(history), history.metrics["train/learning_rate"].finite()
    if not now:
        return []
    to = usual if now > 3 * usual else now / 3
    if went_well_until is not None and went_well_until < warmup_steps(history) and len(rates):
        to = min(to, robust.at(rates, went_well_until) / 2)  # it broke on the way up
    return [Change("model.optim.learning_rate", now, robust.rounded(to))]


def longer_warmup(history: History) -> list[Change]:
    """2 / (1 - beta2) steps at least, in which AdamW's second moment fills (Ma and Yarats, arXiv:1910.04209)."""
    betas = history.key("model.optim.betas") or (0.9, 0.95)
    steps = max(2 / (1 - min(betas[1], 0.9999)), 2 * warmup_steps(history))
    to = round(min(steps, WARMUP_SHARE * max_steps(history)))
    now = history.key("model.optim.warmup", 0)
    return [Change("model.optim.warmup", now, to, note="steps")] if to > warmup_steps(history) else []


def higher_rate(history: History) -> list[Change]:
    now, to = peak_rate(history), robust.rounded(usual_rate(history))
    return [Change("model.optim.learning_rate", now, to)] if now and now < to else []


def travel(history: History) -> float:
    """How far a weight can have come: AdamW moves it by the learning rate at most, step by step."""
    rates = history.metrics["train/learning_rate"].finite()
    return float((rates.values * np.diff(rates.steps, prepend=0)).sum()) if len(rates) else 0.0


def larger_batch(history: History) -> list[Change]:
    """Of NOISY_TOKENS and more, by a power of two."""
    size, length = history.key("data.global_batch_size"), history.key("data.seq_len")
    if not size or not length:
        return []
    times = 2 ** max(1, math.ceil(math.log2(NOISY_TOKENS / (size * length))))
    return [Change("data.global_batch_size", size, times * size)]


def batch_is_small(history: History) -> bool:
    size, length = history.key("data.global_batch_size"), history.key("data.seq_len")
    return bool(size and length and size * length < NOISY_TOKENS)


def rate_is_high(history: History) -> bool:
    """One step moves a weight by its whole size; or beyond what a model of this size usually bears."""
    now = peak_rate(history)
    return bool(now and now > min(WEIGHT, 10 * usual_rate(history)))


def rate_is_low(history: History) -> bool:
    """All steps together cannot have moved a weight by a tenth of its size."""
    return bool(len(history.metrics["train/learning_rate"])) and travel(history) < WEIGHT / 10
