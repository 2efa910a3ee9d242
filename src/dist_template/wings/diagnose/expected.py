"""Metrics and reference values of a run, and the changes of learning rate that rules propose.

First how long a run is and how far it got, then which metrics it has and when they are settled,
then its learning rate beside the usual one, and last the causes that several rules name."""

import math
from typing import Any

import numpy as np

from ...metric_names import loss_of
from ...observe.history.run import RunFile, read_lines
from ..history import History, Series
from . import robust
from .finding import Cause, Change

# Steps after the warm-up: before them, loss and gradient norms change by themselves.
SETTLED_STEPS = 20
# Share of the rate from scratch; OpenAI's fine-tuning guide (2021) gives 0.02 to 0.2.
FINE_TUNING = 0.1
OF_ADAPTERS = 10  # times the rate of all weights, as text/auto.py has it
WARMUP_SHARE = 0.2  # of max_steps: the longest warm-up that is proposed
WEIGHT = 0.02  # standard deviation of an initial weight: transformers' usual initializer_range
HOPELESS = 100  # times the usual rate: no warm-up makes such a rate stable


def last_step(history: History) -> int:
    """Returns the last optimizer step that the run has recorded."""
    ends = [0]
    for name in history.metrics.names:
        ends.append(int(history.metrics[name].steps[-1]))
    for line in read_lines(history.folder / RunFile.GOODPUT, "step")[-1:]:
        ends.append(int(line["step"]))
    for crash in history.crashes:
        ends.append(int(crash.get("step") or 0))
    return max(ends)


def progress(history: History) -> str:
    """Returns "step 20 of 100"."""
    last = last_step(history)
    end = max_steps(history)
    # With several optimizers, Lightning counts the steps of each, but ends after max_steps batches:
    # the last step exceeds the end, which is left out.
    if math.isfinite(end) and last <= end:
        return f"step {last} of {end:.0f}"
    return f"step {last}"


def max_steps(history: History) -> float:
    """Returns the optimizer steps of the full training; inf without a limit."""
    steps = history.fact("training.max_steps") or history.key("trainer.max_steps")
    return float(steps) if isinstance(steps, int | float) and steps > 0 else math.inf


def metric(history: History, name: str) -> Series:
    """Returns the finite values of a metric."""
    return history.metrics[name].finite()


ACCURACY = "train/token_accuracy"  # of the library's language models
TRAINING = "train/loss"  # the library logs it, of whatever loss a module trains by
VALIDATION = "eval/loss"  # of the library's own modules


def training_loss(history: History, of_several: bool = False) -> str:
    """Returns the name of the training loss; "" if none was logged. The losses of several
    optimizers, as a GAN's, need not fall, so they are none unless `of_several`."""
    if not of_several and len(history.fact("training.optimizers") or ()) > 1:
        return ""
    names = history.metrics.names
    name = loss_of(names, TRAINING, "train")
    if not name:
        name = loss_of(names, TRAINING, "")
    return name


def validation_loss(history: History) -> str:
    """Returns the name of the validation loss; "" if none was logged."""
    return loss_of(history.metrics.names, VALIDATION, "validation")


def is_adam(history: History) -> bool:
    """Returns whether the optimizer is a variant of Adam, for which the usual rates are known;
    language models have it unless they say otherwise."""
    if history.is_text:
        return True
    names = history.fact("training.optimizers")
    return names is not None and any("adam" in str(name).lower() for name in names)


def steady(history: History, name: str) -> Series:
    """Returns a metric without its first entry, in which kernels and caches warm up."""
    return metric(history, name)[1:]


def settled(history: History, name: str) -> Series:
    """Returns a metric without the start of training."""
    series = metric(history, name)
    return series[series.steps > settled_after(history)]


def step_s(history: History) -> float:
    """Returns the median seconds of an optimizer step; NaN if none was recorded."""
    return robust.median(metric(history, "perf/step_s").values)


def warmup_steps(history: History) -> float:
    warmup, steps = history.number("model.optim.warmup"), max_steps(history)
    if warmup >= 1:
        return float(warmup)
    return warmup * steps if math.isfinite(steps) else 0.0


def settled_after(history: History) -> float:
    """Returns the step after which metrics are judged; earlier in a short training."""
    return warmup_steps(history) + min(SETTLED_STEPS, max_steps(history) / 5)


def passes(history: History, step: int) -> float:
    """Returns how often the train split had been read at a step; 0 if not known."""
    total = history.fact("data.train_tokens")
    tokens = metric(history, "train/tokens")
    read = tokens[tokens.steps <= step]
    if not total or not len(read):
        return 0.0
    return read.last / total


def usual_rate(history: History) -> float:
    """Returns the usual peak learning rate of AdamW for the model's size (if not known, 10 M).
    0.003239 - 0.0001395 ln(N) for N parameters without embeddings (Kaplan et al., arXiv:2001.08361,
    appendix D.6), right within a factor of a few; less from pretrained weights, and ten times that
    for adapters."""
    parameters = history.fact("parameters.total", 1e7)
    embedding = history.fact("parameters.embedding")
    if embedding:
        parameters -= embedding
    # The fit ends at 10 billion parameters, where it gives 2e-5.
    rate = max(0.003239 - 0.0001395 * math.log(max(parameters, 1000)), 2e-5)
    if history.key("model.pretrained"):
        rate *= FINE_TUNING
    if history.key("model.adapter"):
        rate *= OF_ADAPTERS
    return rate


def highest(given: Any) -> float:
    """Returns a key's value, or the highest of its phases by consumed tokens; 0 of another type,
    which a key of a user's own class may have."""
    values = [given]
    if isinstance(given, list):
        values = [phase.get("value") for phase in given if isinstance(phase, dict)]
    return max((value for value in values if isinstance(value, int | float)), default=0.0)


def peak_rate(history: History) -> float:
    """Returns the configured peak learning rate, or else the highest one recorded; 0 if neither is
    known."""
    configured = highest(history.key("model.optim.learning_rate"))
    if configured:
        return configured
    recorded = metric(history, "train/learning_rate").values
    return float(recorded.max(initial=0.0))


def rate_is_high(history: History) -> bool:
    """Returns whether one step moves a weight by its size, or the rate is 10 times the usual."""
    return is_adam(history) and peak_rate(history) > min(WEIGHT, 10 * usual_rate(history))


def lower_rate(history: History, stable_until: float = math.inf) -> list[Change]:
    """Proposes a lower peak learning rate: if `stable_until`, the last step at which training was
    stable, is in the warm-up, at most half of its rate."""
    now = peak_rate(history)
    usual = usual_rate(history)
    rates = metric(history, "train/learning_rate")
    if not now:
        return []
    to = usual if now > 3 * usual else now / 3
    if stable_until < warmup_steps(history) and len(rates):
        index = max(0, int(np.searchsorted(rates.steps, stable_until, side="right")) - 1)
        stable = float(rates.values[index])
        if stable:  # 0 in the first step of a warm-up
            to = min(to, stable / 2)
    return [Change("model.optim.learning_rate", now, robust.rounded(to))]


def instability_causes(history: History, stable_until: float = math.inf) -> list[Cause]:
    """Returns the causes of steps that are too large, the likeliest for these settings first."""
    now, usual = peak_rate(history), usual_rate(history)
    compared = ""
    if now > 2 * usual and is_adam(history):
        compared = f": {now:.2g}, where {usual:.1g} is usual"
    causes = [Cause(f"The learning rate is too high{compared}.", lower_rate(history, stable_until))]
    # AdamW's second moment needs 2 / (1 - beta2) steps (arXiv:1910.04209).
    warmup = warmup_steps(history)
    beta2 = min(_betas(history)[1], 0.9999)
    longer = max(2 / (1 - beta2), 2 * warmup)
    longer = round(min(longer, WARMUP_SHARE * max_steps(history)))
    if longer > warmup and stable_until <= settled_after(history) + 2 * SETTLED_STEPS:
        change = Change("model.optim.warmup", history.key("model.optim.warmup", 0), longer, "steps")
        is_first = warmup < 2 and now <= HOPELESS * usual
        causes.insert(0 if is_first else 1, Cause("The warm-up is too short.", [change]))
    causes += not_clipped(history)
    damaged = "The samples of that step are damaged: inspect them"
    return [*causes, damaged_samples(history, "numerics.on_spike", damaged)]


def _betas(history: History) -> tuple[float, ...]:
    given = history.key("model.optim.betas")
    if not isinstance(given, list | tuple):
        return (0.9, 0.95)
    if not all(isinstance(beta, int | float) for beta in given):
        return (0.9, 0.95)
    if len(given) < 2:
        return (*given, 0.95)
    return tuple(given)


def damaged_samples(history: History, key: str, sentence: str) -> Cause:
    """Returns the cause that samples are damaged, with the policy `key` that skips such steps
    unless the run has it."""
    now = history.key(key)
    if now == "skip":
        return Cause(f"{sentence}; such steps are skipped.")
    return Cause(f"{sentence}, or skip such steps.", [Change(key, now, "skip")])


def not_clipped(history: History) -> list[Cause]:
    """Returns the cause that gradients are not clipped, if they are not."""
    if history.key("trainer.gradient_clip_val", 1.0):
        return []
    if history.fact("training.is_manual"):  # Lightning then clips nothing, whatever the key says
        return []
    clip = Change("trainer.gradient_clip_val", None, 1.0)
    return [Cause("Gradients are not clipped.", [clip])]


def known_waits(history: History) -> list[Cause]:
    """Returns the cause that `rehearse --gpu` has found in the code of the run, if any."""
    waits = history.fact("training.waits")
    if not waits:
        return []
    return [Cause(f"The host waits for the device in each step: {'; '.join(waits)}.")]


def bf16(history: History) -> Change:
    return Change("trainer.precision", history.key("trainer.precision"), "bf16-mixed")
