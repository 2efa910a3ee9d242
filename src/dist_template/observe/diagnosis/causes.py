"""Causes that several rules name, in the order of what this run's settings suggest."""

from __future__ import annotations

from ..history.run import History
from . import expected
from .finding import Cause, Change

HOPELESS = 100  # times the usual rate: more than any warm-up makes bearable
ROOM = 0.6  # of the memory: below it the micro-batch can be larger


def too_hot(history: History, went_well_until: float) -> list[Cause]:
    """What makes steps too large, in the order of what this run's settings suggest."""
    now, usual = expected.peak_rate(history), expected.usual_rate(history)
    compared = f": {now:.2g} where {usual:.1g} is usual for a model of this size" if now and now > 2 * usual else ""
    rate = Cause(f"The learning rate is too high{compared}.", expected.lower_rate(history, went_well_until))
    short = Cause("The warm-up is too short.", expected.longer_warmup(history))
    causes = [rate]
    if short.changes and went_well_until <= expected.settled_after(history) + 2 * expected.SETTLED_STEPS:
        no_warmup, hopeless = expected.warmup_steps(history) < 2, now and now > HOPELESS * usual
        causes = [short, rate] if no_warmup and not hopeless else [rate, short]
    if not history.key("trainer.gradient_clip_val", 1.0):
        causes.append(Cause("Nothing clips the gradients.", [Change("trainer.gradient_clip_val", None, 1.0)]))
    if str(history.key("trainer.precision", "")).startswith("16"):
        causes.append(Cause("fp16 has too small a range.", [bf16(history)]))
    return [
        *causes,
        Cause("The samples around that step are bad: look at them, or leave such steps out.", [skip_spikes()]),
    ]


def of_small_batch(history: History) -> list[Cause]:
    if not expected.batch_is_small(history) or expected.rate_is_high(history):
        return []
    tokens = history.key("data.global_batch_size") * history.key("data.seq_len")
    return [Cause(f"A step sees {tokens} tokens: each batch says something else.", expected.larger_batch(history))]


def skip_spikes() -> Change:
    return Change("numerics.on_spike", "off", "skip")


def bf16(history: History) -> Change:
    return Change("trainer.precision", history.key("trainer.precision"), "bf16-mixed")


def larger_micro_batch(history: History) -> list[Change]:
    """As large as memory allows by what the present one takes, and the accumulation can give."""
    size, accumulation = history.key("data.micro_batch_size"), history.fact("data.accumulation") or 1
    share = history.metrics["memory/peak_share"].finite()
    room = ROOM / max(share.last, 0.01) if len(share) else 4.0
    times = max((each for each in range(1, accumulation + 1) if accumulation % each == 0 and each <= room), default=1)
    return [Change("data.micro_batch_size", size, times * size)] if size and times > 1 else []
