"""Rules about a pipeline: how long its stages wait, and whether they take the same time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import chain, repeat

from ....parallel.axes import PipelineAxis
from ....parallel.pipeline.costs import balanced
from ...history.run import History
from .. import expected, robust
from ..finding import Cause, Change, Finding
from ..memory import STRATEGY

MIN_POINTS = 4  # log steps after the first
WAITS = 0.25  # of the time in which a device computes: 20 % of a step
UNEVEN = 1.2  # times the mean rank's time: a step takes so much longer


def pipeline_waits(history: History) -> Iterator[Finding]:
    """Reports the bubble: a device waits while the pipeline fills and empties."""
    num, stages = history.fact("data.accumulation"), history.fact("pipeline.stages")
    bubble = history.fact("pipeline.bubble", 0.0) / (num or 1)
    if not num or bubble <= WAITS:
        return
    causes, size = [], history.key("data.micro_batch_size") or 1
    if smaller := [each for each in range(1, size) if size % each == 0]:
        to = max((each for each in smaller if bubble * each / size <= WAITS), default=1)
        change = Change("data.micro_batch_size", size, to)
        causes.append(Cause("More, smaller micro-batches: same global batch.", [change]))
    schedule, blocks = history.fact("pipeline.schedule"), history.fact("pipeline.blocks")
    if schedule in ("GPipe", "1F1B") and sum(blocks) >= 2 * len(stages):
        sentence = "Two stages on each device, and gradients of weights computed in the gaps."
        change = Change(f"{STRATEGY}pp_schedule", schedule, "ZBVZeroBubble")
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
    longest, rank = max((sum(times[n] for n in own), rank) for rank, own in enumerate(stages))
    ratio = longest / (sum(times) / len(stages))
    if ratio < UNEVEN:
        return
    each = [seconds / number for seconds, number in zip(times, blocks, strict=True)]
    each[-1] = min(each[-1], statistics.median(each[:-1]))  # the rest is the output layer's
    costs, head = [*chain.from_iterable(map(repeat, each, blocks))], times[-1]
    layers = balanced(costs, head - each[-1] * blocks[-1], len(blocks))
    numbers = " and ".join(str(number + 1) for number in stages[rank])
    causes = [Cause(f"The machine of stage {numbers} is slow: compare gpu/ and host/.")]
    if layers != blocks:
        sentence = "The stages have unequal work: these numbers of blocks make it even."
        causes.insert(0, Cause(sentence, [Change(f"{STRATEGY}pp_layers", blocks, layers)]))
    seconds = ", ".join(f"{value:.3g}" for value in times)
    evidence = (
        f"Forward and backward of a step take {seconds} s in the stages, of {blocks} blocks; the"
        f" slowest device takes {ratio:.2f} times the mean."
    )
    confidence, steps = "certain" if ratio > 1.5 else "likely", robust.span(series[0])
    title, slow = f"the pipeline waits for stage {numbers}", ("slow_rank",)
    rule = "uneven_stages"
    yield Finding(rule, "warning", confidence, title, evidence, causes, steps, explains=slow)
