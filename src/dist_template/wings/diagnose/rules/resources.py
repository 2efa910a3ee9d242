"""Rules about time and memory: data loading, slow ranks, pipelines, precision, device memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from operator import truediv

import numpy as np

from ....observe.history.run import History
from ....parallel.mesh_sizes import PipelineAxis
from ....parallel.pipeline.stages import divided
from .. import expected, robust
from ..finding import Cause, Change, Finding
from ..memory import STRATEGY

MIN_POINTS = 4  # log steps after the first
WAITS, WAITS_LONG = 0.1, 0.3  # share of a step that is spent waiting for the next batch
MIN_WAIT_S = 0.015  # per step; shorter waits are the training loop itself
SLOW_RANK = 1.25  # times the median rank; equal machines differ by some hundredths
SAME_RANK, ALWAYS_SAME_RANK = 0.7, 0.9  # share of the log steps in which one rank is slowest
FULL = 0.95  # of the device memory: the rest is needed for fragmentation and a longer batch
GROWTH = 0.1  # of the memory allocated at the start
MIN_MEMORY_POINTS = 20
BUBBLE = 0.25  # of the time in which a device computes: 20 % of a step
UNEVEN = 1.2  # times the mean device's time: a step takes so much longer
STEADY = 0.9  # share of pairs of medians in which the later one is higher


def waits_for_data(history: History) -> Iterator[Finding]:
    waits = expected.steady(history, "perf/data_wait_share")
    if len(waits) < MIN_POINTS:
        return
    share = robust.median(waits.values)
    if share < WAITS or expected.wait_s(history) < MIN_WAIT_S:
        return
    workers, ranks = history.key("data.num_workers", 0), history.fact("machine.world_size") or 1
    hosts = len(set(history.fact("machine.hosts") or [None]))
    cores = (history.environment.get("cpu_count") or 8) * hosts // ranks
    more = min(max(2 * workers, 2), max(cores - 1, 1))
    change = [Change("data.num_workers", workers, more)] if more > workers else []
    cache = history.key("data.cache_dir")
    move = Change("data.cache_dir", cache, "/tmp/data_cache", note="any local disk")
    causes = [
        Cause("Reading a batch takes longer than a step: use worker processes.", change),
        Cause(f"data.cache_dir ({cache}) is on a slow disk: copy it to a local disk.", [move]),
    ]
    evidence = (
        f"{share:.0%} of each step is spent waiting for the next batch (median of"
        f" perf/data_wait_share); without it training would be {1 / (1 - share):.1f} times as fast."
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
        Cause("Its shard of the data takes longer: longer rows, or a slower disk."),
    ]
    if robust.tail(expected.metric(history, "gpu/throttled")) > 0:  # NaN without GPUs
        causes.insert(0, Cause("Its GPU is throttled: cooling or power (gpu/temperature_c)."))
    evidence = (
        f"Rank {rank}{host} takes {times:.2f} times the median rank's own time, and was the"
        f" slowest at {counts.max()} of {len(which)} log steps."
    )
    confidence = "certain" if same >= ALWAYS_SAME_RANK and times > 1.5 else "likely"
    title, steps = f"all ranks wait for rank {rank}{host}", robust.span(when_slowest)
    explains = ("waits_for_data",)
    yield Finding("slow_rank", "warning", confidence, title, evidence, causes, steps, [rank], explains)


def fp32_on_gpu(history: History) -> Iterator[Finding]:
    precision = str(history.key("trainer.precision") or "32-true")
    if not history.fact("machine.supports_bf16") or not precision.startswith("32"):
        return
    device = history.fact("machine.device")
    evidence = f"trainer.precision is {precision} on {device}: several times slower than bf16."
    cause = Cause("No precision is set.", [Change("trainer.precision", precision, "bf16-mixed")])
    title = "training runs in fp32 on a GPU that supports bf16"
    yield Finding("fp32_on_gpu", "warning", "certain", title, evidence, [cause])


def memory_nearly_full(history: History) -> Iterator[Finding]:
    share = expected.metric(history, "memory/peak_share")
    if not len(share) or share.last <= FULL:
        return
    causes, size = [], history.key("data.micro_batch_size") or 1
    if size > 1:
        to = max(each for each in range(1, size) if size % each == 0)
        smaller = "The micro-batch is too large; a smaller one keeps the global batch."
        causes.append(Cause(smaller, [Change("data.micro_batch_size", size, to)]))
    if history.key("model.blocks.checkpointing", "none") == "none":
        change = Change("model.blocks.checkpointing", "none", "selective")
        causes.append(Cause("All activations are kept for backward.", [change]))
    evidence = f"memory/peak_share is {share.last:.1%} at step {share.steps[-1]}."
    title, steps = "memory is nearly full", robust.span(share)
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
    rate = (last - first) / (end - begin)
    share = expected.metric(history, "memory/peak_share")
    total = last / share.last if len(share) and share.last > 0 else None
    full = f"; full at step {int(end + (total - last) / rate):,}" if total else ""
    evidence = (
        f"memory/allocated_gib went from {first:.2f} to {last:.2f} between steps {begin} and {end},"
        f" {1024 * rate:.3g} MiB per step{full}."
    )
    cause = Cause("A tensor of every step is kept: a list of losses, or a sum of losses without .detach().")
    title = "memory grows from step to step"
    yield Finding("memory_grows", "warning", "likely", title, evidence, [cause], (begin, end))


def pipeline_waits(history: History) -> Iterator[Finding]:
    """Reports the bubble: a device waits while the pipeline fills and empties."""
    num, stages = history.fact("data.accumulation"), history.fact("pipeline.stages")
    bubble = history.fact("pipeline.bubble", 0.0) / (num or 1)
    if not num or bubble <= BUBBLE:
        return
    causes, size = [], history.key("data.micro_batch_size") or 1
    if size > 1:
        to = size - 1
        while to > 1 and (size % to or bubble * to / size > BUBBLE):
            to -= 1
        change = Change("data.micro_batch_size", size, to)
        causes.append(Cause("More, smaller micro-batches: same global batch.", [change]))
    schedule, blocks = history.fact("pipeline.schedule"), history.fact("pipeline.blocks")
    if schedule == "1F1B" and sum(blocks) >= 2 * len(stages):
        sentence = "Two stages on each device: a device waits half as long, and sends twice as much."
        change = Change(f"{STRATEGY}pp_schedule", schedule, "Interleaved1F1B")
        causes.append(Cause(sentence, [change]))
    sentence = f"The global batch is small for so many stages: a lower {PipelineAxis.key}."
    causes.append(Cause(sentence))
    evidence = (
        f"{bubble / (1 + bubble):.0%} of a step: {num} micro-batches through {len(stages)} devices"
        f" by {schedule}, if all stages take the same time."
    )
    title = "the stages of the pipeline wait for each other"
    yield Finding("pipeline_waits", "warning", "certain", title, evidence, causes)


def uneven_stages(history: History) -> Iterator[Finding]:
    stages, blocks = history.fact("pipeline.stages") or [], history.fact("pipeline.blocks") or []
    series = [expected.steady(history, f"pipeline/stage{n + 1}_s") for n in range(len(blocks))]
    if len(series) < 2 or min(map(len, series)) < MIN_POINTS:
        return
    times = [robust.median(each.values) for each in series]
    of_devices = [sum(times[n] for n in numbers) for numbers in stages]
    rank = int(np.argmax(of_devices))
    ratio = of_devices[rank] / np.mean(of_devices)
    if ratio < UNEVEN:
        return
    each = statistics.median(map(truediv, times[:-1], blocks))  # of a block; the last stage has the output layer too
    layers = divided(sum(blocks), max(0.0, times[-1] / each - blocks[-1]), len(blocks))
    numbers = " and ".join(map(str, np.add(stages[rank], 1)))
    causes = [Cause(f"The machine of stage {numbers} is slow: compare gpu/ and host/.")]
    if layers != blocks:
        sentence = "The stages have unequal work: these numbers of blocks make it even."
        causes.insert(0, Cause(sentence, [Change(f"{STRATEGY}pp_layers", blocks, layers)]))
    seconds = ", ".join(map("{:.3g}".format, times))
    evidence = (
        f"Forward and backward of a step take {seconds} s in the stages, of {blocks} blocks; the"
        f" slowest device takes {ratio:.2f} times the mean."
    )
    confidence, steps = "certain" if ratio > 1.5 else "likely", robust.span(series[0])
    title, slow = f"the pipeline waits for stage {numbers}", ("slow_rank",)
    rule = "uneven_stages"
    yield Finding(rule, "warning", confidence, title, evidence, causes, steps, explains=slow)
