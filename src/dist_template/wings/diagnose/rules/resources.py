"""Rules about time and memory: data loading, slow ranks, precision, leaks, checkpoints,
validations."""

from collections.abc import Iterator

import numpy as np

from ...history import History
from .. import expected, robust
from ..finding import Cause, Change, Finding
from ..remedies import memory_use, remedies

MIN_POINTS = 4  # log steps after the first
WAITS, WAITS_LONG = 0.1, 0.3  # share of a step that is spent waiting for the next batch
MIN_WAIT_S = 0.015  # per step; shorter waits are the training loop itself
SLOW_RANK = 1.25  # times the median rank; equal machines differ by some hundredths
SAME_RANK, ALWAYS_SAME_RANK = 0.7, 0.9  # share of the log steps in which one rank is slowest
FULL = 0.95  # of the device's memory: the rest is for fragmentation and a longer batch
GROWTH = 0.1  # of the memory allocated at the start
MIN_MEMORY_POINTS = 20
STEADY = 0.9  # share of pairs of medians in which the later one is higher
CHECKPOINTS, VALIDATIONS = 0.1, 0.2  # largest share of the time
SHORT_RUN_S = 60.0  # a shorter run may spend twice the share
TARGET = 0.05  # share of the time at the proposed interval
MIN_NUMBER = 3  # checkpoints or validations, before their cost is judged


def memory_nearly_full(history: History) -> Iterator[Finding]:
    """Reports a device whose memory is nearly full: a longer batch or fragmentation ends the run.

    The newest peaks count, because a run may begin with less. On a CPU the share is the host's, and
    the limit is the same: beyond it the kernel kills the process."""
    share = expected.metric(history, "memory/peak_share")
    if not len(share) or share.last <= FULL:
        return
    causes = []
    if history.fact("parameters.total"):
        causes = remedies(memory_use(history, {}))
    size = history.number("data.micro_batch_size", 1)
    if not causes and size > 1:
        to = max(each for each in range(1, size) if size % each == 0)
        sentence = "The micro-batch is too large; a smaller one, accumulated, has the same batch."
        causes = [Cause(sentence, [Change("data.micro_batch_size", size, to)])]
    evidence = f"memory/peak_share is {share.last:.1%} at step {share.steps[-1]}; above {FULL:.0%}"
    evidence += " a longer batch or fragmentation runs out of memory."
    title, steps = "memory is nearly full", robust.span(share[share.values > FULL])
    yield Finding("memory_nearly_full", "warning", "certain", title, evidence, causes, steps)


def memory_grows(history: History) -> Iterator[Finding]:
    used = expected.settled(history, "memory/allocated_gib")
    if len(used) < MIN_MEMORY_POINTS:
        return
    first, last = robust.head(used), robust.tail(used)
    if last < (1 + GROWTH) * first or robust.rising_share(used) < STEADY:
        return
    third = len(used) // 3
    if last - robust.median(used.values[third:-third]) < (last - first) / 4:
        return  # a leak grows as much in the second half; allocators grow at the start
    begin, end = robust.span(used)
    evidence = (
        f"memory/allocated_gib went from {first:.2f} to {last:.2f} between steps {begin} and {end}."
    )
    cause = Cause(
        "A tensor of every step is kept: a list of losses, or a sum of losses without .detach()."
    )
    title = "memory grows from step to step"
    yield Finding("memory_grows", "warning", "likely", title, evidence, [cause], (begin, end))


def waits_for_data(history: History) -> Iterator[Finding]:
    waits = expected.steady(history, "perf/data_wait_share")
    share = robust.median(waits.values)
    if len(waits) < MIN_POINTS or share < WAITS or share * expected.step_s(history) < MIN_WAIT_S:
        return
    workers, ranks = history.number("data.num_workers"), history.fact("machine.world_size") or 1
    hosts = len(set(history.fact("machine.hosts") or [None]))
    cores = (history.environment.get("cpu_count") or 8) * hosts // ranks
    more = min(max(2 * workers, 2), max(cores - 1, 1))
    change = [Change("data.num_workers", workers, more)] if more > workers else []
    cache = history.key("data.cache_dir")
    move = Change("data.cache_dir", cache, "/tmp/data_cache", note="any local disk")
    causes = [
        Cause("Reading a batch takes longer than a step: use worker processes.", change),
        Cause(f"data.cache_dir ({cache}) is on a slow disk: copy it to a local disk.", [move]),
        *expected.known_waits(history),
    ]
    evidence = (
        f"{share:.0%} of each step is spent waiting for the next batch (median of"
        " perf/data_wait_share)."
    )
    confidence, title = "certain" if share >= WAITS_LONG else "likely", "training waits for data"
    steps = robust.span(waits)
    yield Finding("waits_for_data", "warning", confidence, title, evidence, causes, steps)


def slow_rank(history: History) -> Iterator[Finding]:
    """Reports that all ranks wait for one and the same rank."""
    ratio = expected.steady(history, "rank/slowest_over_median")
    which = expected.steady(history, "rank/slowest")
    if len(ratio) < MIN_POINTS or len(which) != len(ratio):
        return
    ranks, counts = np.unique(which.values.astype(int), return_counts=True)
    rank, same = int(ranks[np.argmax(counts)]), counts.max() / len(which)
    when_slowest = ratio[which.values == rank]
    times = robust.median(when_slowest.values)
    if same < SAME_RANK or times < SLOW_RANK:
        return
    hosts = history.fact("machine.hosts") or []
    host = f" on {hosts[rank]}" if rank < len(hosts) else ""
    causes = [
        Cause(f"The machine{host} runs another job, or has a failing disk or too few cores."),
        Cause(
            "Its GPU is throttled: cooling or power; `nvidia-smi -q -d PERFORMANCE` there names"
            " the reason."
        ),
        Cause("Its shard of the data takes longer: longer rows, or a slower disk."),
        *expected.known_waits(history),
        *_less_work(history),
    ]
    evidence = (
        f"Rank {rank}{host} takes {times:.2f} times the median rank's own time, and was the"
        " slowest at"
    )
    evidence += f" {counts.max()} of {len(which)} log steps."
    confidence = "certain" if same >= ALWAYS_SAME_RANK and times > 1.5 else "likely"
    title, steps = f"all ranks wait for rank {rank}{host}", robust.span(when_slowest)
    yield Finding(
        "slow_rank",
        "warning",
        confidence,
        title,
        evidence,
        causes,
        steps,
        [rank],
        ("waits_for_data",),
    )


def _less_work(history: History) -> list[Cause]:
    """Returns what helps where a rank stays slow; only text in micro-batches of several rows."""
    is_set = history.key("data.rank_speeds") is not None
    if is_set or history.number("data.micro_batch_size", 1) < 2:
        return []
    note = "a number for each data-parallel rank under ZeRO-3 and expert parallelism"
    change = Change("data.rank_speeds", None, "measured", note)
    return [Cause("The rank stays slow: give it fewer rows.", [change])]


def fp32_on_gpu(history: History) -> Iterator[Finding]:
    precision = str(history.key("trainer.precision") or "32-true")
    if not history.fact("machine.supports_bf16") or not precision.startswith("32"):
        return
    device = history.fact("machine.device")
    evidence = f"trainer.precision is {precision} on {device}: several times slower than bf16."
    cause = Cause("No precision is set.", [expected.bf16(history)])
    title = "training runs in fp32 on a GPU that supports bf16"
    yield Finding("fp32_on_gpu", "warning", "certain", title, evidence, [cause])


def checkpoint_overhead_high(history: History) -> Iterator[Finding]:
    key = "last_checkpoint.every_n_steps"
    num = expected.last_step(history) // (history.key(key) or 1)
    yield from _overhead(history, "checkpoint", num, CHECKPOINTS, key)


def validation_overhead_high(history: History) -> Iterator[Finding]:
    steps = history.metrics[expected.validation_loss(history)].steps
    num = int((steps > 0).sum())  # the first one counts as start-up
    yield from _overhead(history, "validation", num, VALIDATIONS, "trainer.val_check_interval")


def _overhead(history: History, kind: str, num: int, limit: float, key: str) -> Iterator[Finding]:
    every, step_s = history.key(key), expected.step_s(history)
    spent_s, total_s = history.goodput.get(kind, 0.0), sum(history.goodput.values())
    total_s -= history.goodput.get("start", 0.0) + history.goodput.get("restart", 0.0)
    if total_s <= SHORT_RUN_S:
        limit *= 2
    if (
        num < MIN_NUMBER
        or not isinstance(every, int)
        or not step_s > 0
        or spent_s <= limit * total_s
    ):
        return
    each_s = spent_s / num
    to = int(robust.rounded(min(each_s / (TARGET * step_s), expected.max_steps(history) / 4)))
    if to <= every:
        return
    causes = [Cause("The interval is too short.", [Change(key, every, to)])]
    if kind == "checkpoint" and not history.key("last_checkpoint.asynchronous"):
        change = Change("last_checkpoint.asynchronous", False, True)
        causes.append(Cause("Training waits until each checkpoint is written.", [change]))
    evidence = (
        f"{spent_s / total_s:.0%} of {total_s:.0f} s: {num} {kind}s of {each_s:.2g} s, one every"
    )
    evidence += f" {every} steps of {step_s:.3g} s."
    rule, title = f"{kind}_overhead_high", f"{kind}s take too much time"
    explains = ("waits_for_data",)  # the data loader's restart after each is counted as waiting
    confidence = "certain" if total_s > SHORT_RUN_S else "likely"
    yield Finding(rule, "warning", confidence, title, evidence, causes, explains=explains)
