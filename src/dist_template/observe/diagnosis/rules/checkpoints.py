"""What checkpoints cost and what failures cost, and whether the job ends before the training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ...history.run import History
from .. import expected, robust
from ..engine import rule
from ..finding import Cause, Change, Finding

# Without failures of its own to count: one in 50,000 hours of a GPU. Llama 3 405B: 419 unexpected interruptions in 54
# days on 16,384 GPUs (arXiv:2407.21783, table 5).
GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
TOO_RARE = 4.0  # times the best interval: there it costs twice what it would at the best one
DEAR, DEAR_AT_ONCE, SHORT_S = 0.1, 0.2, 60.0  # of the time; and in a run of seconds, which may spend more
FEWEST = 4  # checkpoints of a run, however short
LOST = 0.05  # of the time
MIN_POINTS = 10  # log steps, before their pace tells when training ends
MARGIN_S = 60.0  # that a step and a save take


@rule
def checkpoint_interval(history: History) -> Iterator[Finding]:
    """Against the best one, sqrt(2 C M) seconds for a save of C and a failure every M (Young, CACM 17(9), 1974)."""
    every, spent = history.key("last_checkpoint.every_n_steps"), history.goodput
    step_s = robust.median(history.metrics["perf/step_s"].finite().values)
    total, done = expected.running_s(history), expected.last_step(history)
    if not every or not total or not done or not math.isfinite(step_s) or step_s <= 0:
        return
    saves = max(1, done // every)
    measured = history.metrics["perf/checkpoint_s"].finite()
    save_s = robust.median(measured.values) if len(measured) else spent.get("checkpoint", 0.0) / saves
    failures = _failures(history)
    ranks = history.fact("machine.world_size") or 1
    between_s = total / failures if failures else GPU_HOURS_PER_FAILURE * 3600 / ranks
    if save_s <= 0:
        return
    best_s = math.sqrt(2 * save_s * between_s)
    to = max(1, int(robust.rounded(min(best_s / step_s, expected.max_steps(history) / FEWEST))))
    change = [Change("last_checkpoint.every_n_steps", every, to)]
    told = f"A save takes {save_s:.2g} s and comes every {every} steps, {every * step_s:.3g} s"
    rate = (
        f"the run failed {failures} time{'s' * (failures > 1)} in {total / 60:.1f} min"
        if failures
        else f"{ranks} such devices fail about every {between_s / 3600:,.0f} h"
    )
    share = spent.get("checkpoint", 0.0) / total
    lost = spent.get("lost", 0.0) / total
    if share > (DEAR if total > SHORT_S else DEAR_AT_ONCE) and to > every and saves >= 3:
        slower = [Change("last_checkpoint.asynchronous", False, True)]
        yield Finding(
            "checkpoint_too_dear", "warning", "certain" if total > SHORT_S else "likely",
            "checkpoints take too much of the time",
            f"{share:.0%} of {total:.0f} s. {told}; {rate}, so every {to} steps is about best.",
            [
                Cause("They come too often.", change),
                Cause("Training waits for each.", [] if history.key("last_checkpoint.asynchronous") else slower),
            ],
            explains=("waits_for_data",),  # part of a save is counted as such
        )  # fmt: skip
    elif every * step_s > TOO_RARE * best_s and to < every and (lost > LOST or _to_come_s(history) > between_s / 10):
        yield Finding(
            "checkpoint_too_rare", "warning", "certain" if lost > LOST else "likely", "checkpoints come too rarely",
            f"{told}; {rate}"
            + (f", and {lost:.0%} of the time went into steps that were done again." if lost else "."),
            [Cause(f"A failure costs {every * step_s / 2:.0f} s of training on average.", change)],
        )  # fmt: skip


def _failures(history: History) -> int:
    """Ends that no checkpoint came before; a preempted attempt has saved."""
    return len(list(history.folder.glob("config.*.yaml"))) if history.goodput.get("lost", 0.0) > 0 else 0


def _to_come_s(history: History) -> float:
    """Seconds of the whole training, at this pace."""
    steps, pace = expected.max_steps(history), _pace_s(history)
    return steps * pace if math.isfinite(steps) and pace else expected.running_s(history)


def _pace_s(history: History) -> float | None:
    """Seconds of an optimizer step, all that comes between two of them included."""
    loss = history.metrics["train/loss"]
    recent = loss[-min(len(loss), 200) :]
    steps = int(recent.steps[-1] - recent.steps[0]) if len(recent) > 1 else 0
    return float(recent.times[-1] - recent.times[0]) / steps if steps else None


@rule
def ends_too_late(history: History) -> Iterator[Finding]:
    """The job's time is up before the last step is done."""
    loss, steps, pace = history.metrics["train/loss"], expected.max_steps(history), _pace_s(history)
    began, ends = history.environment.get("job_started"), _job_ends(history)
    if began is None or ends is None or not math.isfinite(steps) or not pace or len(loss) < MIN_POINTS:
        return
    done, now = int(loss.steps[-1]), float(loss.times[-1])
    needed, left = (steps - done) * pace, ends - now
    if needed <= left or done >= steps:
        return
    limit = history.key("preemption.max_time") or history.key("trainer.max_time")
    jobs = math.ceil((now - began + needed) / (ends - began))
    reaches = int(done + max(left, 0) / pace)
    longer = _clock(now - began + 1.1 * needed + MARGIN_S)
    keys = [Change("preemption.max_time", limit, longer)] if limit else []
    yield Finding(
        "ends_too_late", "warning", "certain" if needed > 1.5 * left else "likely", "the job's time will not suffice",
        f"At step {done} of {steps:.0f} training needs {_clock(needed)} more and has {_clock(max(left, 0))}: it "
        f"will stop around step {reaches} and save. {jobs} such jobs would do.",
        [
            Cause("The limit is too short for the steps.", keys),
            Cause("The steps are too many for the time.", [Change("trainer.max_steps", int(steps), reaches)]),
        ],
    )  # fmt: skip


def _job_ends(history: History) -> float | None:
    """Unix time, by the run's own limit or by Slurm's."""
    environment = history.environment
    limit = history.key("preemption.max_time") or history.key("trainer.max_time")
    began = environment.get("job_started")
    ends = [float(environment["job_ends"])] if environment.get("job_ends") else []
    if limit and began is not None and (seconds := _seconds(limit)):
        ends.append(began + seconds)
    return min(ends, default=None)


def _seconds(limit: object) -> float | None:
    """Of DD:HH:MM:SS."""
    found = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", str(limit))
    units = (86400, 3600, 60, 1)
    return sum(int(part) * unit for part, unit in zip(found.groups(), units, strict=True)) if found else None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days:02}:{hours:02}:{minutes:02}:{rest:02}"
