"""What validation tells, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...history.metrics import Series
from ...history.run import History
from .. import expected, robust
from ..engine import rule
from ..finding import Cause, Change, Finding

MIN_VALIDATIONS = 4
RISE = 0.02  # of the best validation loss, beyond which a later one is worse
FALSE_START = 0.34  # of training without any validation: too late to stop what went wrong; three in all are enough
DEAR, CHEAP = 0.2, 0.05  # of the time: spent on validation, and what it should be
SHORT_S, DEAR_AT_ONCE = 60.0, 0.4  # a run of seconds may spend more
FEW_TOKENS = 2_000  # of a split: a mean loss of a deviation of 2 nats is off by 0.045 there, by chance alone


def _validations(history: History) -> Series:
    """Their losses, without the one before training: no weights are kept of it, and its time counts as the start's."""
    series = history.metrics["eval/loss"]
    return series[series.steps > 0]


@rule
def overfits(history: History) -> Iterator[Finding]:
    """The validation loss has turned, and the training loss has not."""
    held_out, loss = _validations(history).finite(), history.metrics["train/loss"].finite()
    if len(held_out) < MIN_VALIDATIONS or len(loss) < MIN_VALIDATIONS or history.key("data.repeat_first_batch"):
        return  # or it is meant to
    best = int(np.argmin(held_out.values))
    since = held_out[best:]
    rise = held_out.last / since.values[0] - 1
    noise = robust.noise(held_out.values[: best + 1]) / since.values[0] if best > 2 else 0.0
    if len(since) < 3 or rise < max(RISE, 3 * noise) or robust.rising_share(since) < 0.7:
        return
    before = loss[loss.steps <= since.steps[0]]
    if not len(before) or robust.tail(loss) >= robust.tail(before):
        return  # both rise: it diverges
    step, seen = int(since.steps[0]), expected.epochs(history)
    causes = [
        Cause(
            f"It has learned all that carries over by step {step}: stop there (best-step{step} is kept), or earlier by "
            "itself.",
            [Change("trainer.max_steps", _plain(expected.max_steps(history)), step)]
            + [Change("config", None, "configs/preset/early_stopping.yaml")],
        ),
        Cause("The model is not regularised enough.", _more_decay(history)),
    ]
    if seen and seen > 2:
        causes.insert(1, Cause(f"Every token was seen {seen:.1f} times: more data, or a smaller model."))
    yield Finding(
        "overfits", "warning", "certain" if rise > 5 * RISE else "likely", "the model overfits",
        f"eval/loss was {since.values[0]:.4g} at step {step} and is {held_out.last:.4g} at step {held_out.steps[-1]}, "
        f"while train/loss fell from {robust.tail(before):.4g} to {robust.tail(loss):.4g}.",
        causes,
        steps=(step, int(held_out.steps[-1])),
    )  # fmt: skip


def _more_decay(history: History) -> list[Change]:
    now = history.key("model.optim.weight_decay")
    return [] if now is None else [Change("model.optim.weight_decay", now, min(max(0.1, 3 * now), 0.3))]


def _plain(number: float) -> int | None:
    return int(number) if math.isfinite(number) else None


def _larger_split(history: History) -> list[Change]:
    tokens, share = history.fact("data.validation_tokens"), history.key("data.validation_share")
    if not tokens or not share or tokens >= FEW_TOKENS:
        return []
    return [Change("data.validation_share", share, robust.rounded(min(4 * share * FEW_TOKENS / tokens, 0.2)))]


@rule
def validation_too_small(history: History) -> Iterator[Finding]:
    tokens, limited = history.fact("data.validation_tokens"), history.key("trainer.limit_val_batches")
    causes = [Cause("Hold out more.", _larger_split(history))]
    if isinstance(limited, int) and tokens and (batches := _batches(history)) and limited < batches:
        tokens = int(tokens * limited / batches)
        more = min(batches, math.ceil(4 * limited * FEW_TOKENS / max(tokens, 1)))
        causes = [Cause("It is cut short.", [Change("trainer.limit_val_batches", limited, more)])]
    if not tokens or tokens >= FEW_TOKENS or limited == 0:
        return
    yield Finding(
        "validation_too_small", "warning", "likely", "validation measures few tokens",
        f"It has {tokens:,} tokens; its loss is off by some {2 / tokens**0.5:.2f} nats by chance alone.",
        causes,
    )  # fmt: skip


@rule
def validates_too_rarely(history: History) -> Iterator[Finding]:
    """What goes wrong is seen too late, and the best weights are kept of few steps."""
    steps, every = expected.max_steps(history), history.key("trainer.val_check_interval")
    off = history.key("trainer.limit_val_batches") == 0 or not history.key("data.validation_share", 1)
    done = expected.last_step(history)
    if not math.isfinite(steps) or not isinstance(every, int) or steps < 100:  # those are tries
        return
    if off or every <= FALSE_START * steps:
        return
    planned = int(steps // every)
    yield Finding(
        "validates_too_rarely", "warning" if planned < 2 else "info", "likely", "validation comes too rarely",
        f"It comes every {every} of {steps:.0f} steps: {planned or 'no'} time{'s' * (planned != 1)}. At step {done} "
        f"there were {len(_validations(history))}.",
        [Cause("val_check_interval is too long.", [Change("trainer.val_check_interval", every, _nice(steps / 10))])],
    )  # fmt: skip


def _nice(steps: float) -> int:
    return max(1, int(robust.rounded(steps)))


@rule
def validation_too_dear(history: History) -> Iterator[Finding]:
    spent, every = history.goodput, history.key("trainer.val_check_interval")
    total = expected.running_s(history)
    trained = spent.get("productive", 0.0) + spent.get("data_wait", 0.0)
    share = spent.get("validation", 0.0) / max(total, 1e-9)
    number = len(_validations(history))
    if number < 2 or share < (DEAR if total > SHORT_S else DEAR_AT_ONCE) or not isinstance(every, int) or not trained:
        return
    each_s = spent["validation"] / number
    step_s = robust.median(history.metrics["perf/step_s"].finite().values)
    to = _nice(each_s / (CHEAP * step_s)) if step_s > 0 else 10 * every
    to, causes = int(min(to, max(expected.max_steps(history) // 4, 1))), []
    if to > every:
        causes.append(Cause("It comes too often.", [Change("trainer.val_check_interval", every, to)]))
    batches = _batches(history)
    if batches and batches > 8:
        fewer = max(4, int(batches * CHEAP * every * step_s / each_s)) if step_s > 0 else batches // 4
        change = Change("trainer.limit_val_batches", None, fewer, note="batches of each rank")
        causes.append(Cause("The validation split is larger than it needs to be.", [change]))
    yield Finding(
        "validation_too_dear", "warning", "certain" if total > SHORT_S else "likely",
        "validation takes too much of the time",
        f"{share:.0%} of {total:.0f} s: {number} validations of {each_s:.1f} s, every {every} steps of {step_s:.3g} s.",
        causes or [Cause("It comes too often.")],
        explains=("waits_for_data",),  # the loader starts anew after each
    )  # fmt: skip


def _batches(history: History) -> int | None:
    tokens, length = history.fact("data.validation_tokens"), history.key("data.seq_len")
    rows = history.key("data.micro_batch_size", 0) * (history.fact("machine.data_parallel_size") or 1)
    return int(tokens / length / rows) if tokens and length and rows else None
