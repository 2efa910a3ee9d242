"""Rules about the time of a job: cost of checkpoints and validations, time limit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from ....observe.history.run import History
from .. import expected, robust
from ..finding import Cause, Change, Finding

CHECKPOINTS, VALIDATIONS = 0.1, 0.2  # largest share of the time
SHORT_RUN_S = 60.0  # a shorter run may spend twice the share
TARGET = 0.05  # share of the time at the proposed interval
MIN_NUMBER = 3  # checkpoints or validations, before their cost is judged
MIN_POINTS, PACE_POINTS = 10, 200  # log steps from which the pace is taken: least and most
MARGIN_S = 60.0  # for the last step and its checkpoint


def checkpoint_overhead_high(history: History) -> Iterator[Finding]:
    key, loss = "last_checkpoint.every_n_steps", history.metrics["train/loss"]
    num = int(loss.steps[-1]) // (history.key(key) or 1) if len(loss) else 0
    causes = []
    if not history.key("last_checkpoint.asynchronous"):
        change = Change("last_checkpoint.asynchronous", False, True)
        causes.append(Cause("Training waits until each checkpoint is written.", [change]))
    return _overhead(history, "checkpoint", num, CHECKPOINTS, key, causes)


def validation_overhead_high(history: History) -> Iterator[Finding]:
    num = len(robust.later(history.metrics["eval/loss"], 0))  # the first one counts as start-up
    return _overhead(history, "validation", num, VALIDATIONS, "trainer.val_check_interval", [])


def _overhead(
    history: History, kind: str, num: int, limit: float, key: str, causes: Sequence[Cause]
) -> Iterator[Finding]:
    every, step_s = history.key(key), expected.step_s(history)
    spent_s, total_s = history.goodput.get(kind, 0.0), sum(history.goodput.values())
    total_s -= history.goodput.get("start", 0.0) + history.goodput.get("restart", 0.0)
    is_long = total_s > SHORT_RUN_S
    if num < MIN_NUMBER or not isinstance(every, int) or not step_s > 0:
        return
    each_s = spent_s / num
    to = int(robust.rounded(min(each_s / (TARGET * step_s), expected.max_steps(history) / 4)))
    if not is_long:
        limit *= 2
    if spent_s <= limit * total_s or to <= every:
        return
    evidence = (
        f"{spent_s / total_s:.0%} of {total_s:.0f} s: {num} {kind}s of {each_s:.2g} s, one every"
        f" {every} steps of {step_s:.3g} s."
    )
    causes = [Cause("The interval is too short.", [Change(key, every, to)]), *causes]
    rule, title = f"{kind}_overhead_high", f"{kind}s take too much time"
    explains = ("waits_for_data",)  # the data loader's restart after each is counted as waiting
    confidence = "certain" if is_long else "likely"
    yield Finding(rule, "warning", confidence, title, evidence, causes, explains=explains)


def time_limit_too_short(history: History) -> Iterator[Finding]:
    """Reports that the job ends before the last step."""
    loss, steps = history.metrics["train/loss"], expected.max_steps(history)
    limit = history.key("preemption.max_time") or history.key("trainer.max_time")
    started, ends = history.environment.get("job_started"), _job_ends(history, limit)
    if started is None or ends is None or not math.isfinite(steps) or len(loss) < MIN_POINTS:
        return
    recent = loss[-PACE_POINTS:]
    pace_s = float(recent.times[-1] - recent.times[0]) / int(recent.steps[-1] - recent.steps[0])
    done, now = int(loss.steps[-1]), float(loss.times[-1])
    needed_s, left_s = (steps - done) * pace_s, max(ends - now, 0.0)
    if needed_s <= left_s:
        return
    last_step = int(done + left_s / pace_s)
    longer = _clock(now - started + 1.1 * needed_s + MARGIN_S)
    more_time = [Change("preemption.max_time", limit, longer)] if limit else []
    fewer_steps = Change("trainer.max_steps", int(steps), last_step)
    causes = [
        Cause("The limit is too short.", more_time),
        Cause("The training has too many steps.", [fewer_steps]),
    ]
    evidence = (
        f"At step {done} of {steps:.0f} training needs {_clock(needed_s)} more and has"
        f" {_clock(left_s)}: it will stop around step {last_step} and save a checkpoint."
    )
    confidence = "certain" if needed_s > 1.5 * left_s else "likely"
    title = "the time limit is too short"
    yield Finding("time_limit_too_short", "warning", confidence, title, evidence, causes)


def _job_ends(history: History, limit: object) -> float | None:
    """Returns the Unix time at which the run's own limit or Slurm's ends the job, if any."""
    started, slurm = history.environment.get("job_started"), history.environment.get("job_ends")
    ends = []
    if slurm:
        ends.append(float(slurm))
    if started is not None and (found := re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", str(limit))):
        days, hours, minutes, seconds = map(int, found.groups())
        ends.append(started + 86400 * days + 3600 * hours + 60 * minutes + seconds)
    return min(ends, default=None)


def _clock(seconds: float) -> str:
    """Formats seconds as DD:HH:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days:02}:{hours:02}:{minutes:02}:{rest:02}"
