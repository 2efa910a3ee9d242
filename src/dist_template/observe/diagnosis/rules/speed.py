"""What makes training slower than it needs to be, for as far as it can be told from the outside."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...history.run import History
from .. import expected, robust
from ..causes import larger_micro_batch
from ..engine import rule
from ..finding import Cause, Change, Finding

MIN_POINTS = 4  # log steps after the first, which holds the warming up of kernels, allocator and file cache
WAITS, WAITS_LONG = 0.1, 0.3  # of a step, for the next batch
AT_LEAST_S = 0.015  # a step; less is the loop itself, and the ranks' count of tokens, which small steps cannot hide
SLOW_RANK = 1.25  # times the median of the ranks; noise between equal machines is some hundredths
SAME_RANK = 0.7  # of the log steps in which the slowest rank is one and the same
SLOWER, LONG_S = 1.5, 60.0  # times the step time at the start; over a minute at least
FEW_TOKENS = {"cpu": 256, "gpu": 4096}  # of a micro-batch: below, kernels' launches cost more than their work
LOW_MFU = 0.35  # published runs of dense models reach 0.4 to 0.56 on H100 (llm-foundry, litgpt)


def _on_gpu(history: History) -> bool:
    return history.fact("machine.device", "cpu") != "cpu"


@rule
def waits_for_data(history: History) -> Iterator[Finding]:
    waits = expected.steady(history, "perf/data_wait_share")
    if len(waits) < MIN_POINTS:
        return
    share = robust.median(waits.values)
    if share < WAITS or robust.median(expected.wait_s(history)) < AT_LEAST_S:
        return
    workers, ranks = history.key("data.num_workers", 0), history.fact("machine.world_size") or 1
    hosts = len(set(history.fact("machine.hosts") or [None]))
    free = (history.environment.get("cpu_count") or 8) * hosts // ranks
    more = min(max(2 * workers, 2), max(free - 1, 1))
    change = [Change("data.num_workers", workers, more)] if more > workers else []
    yield Finding(
        "waits_for_data", "warning", "certain" if share >= WAITS_LONG else "likely", "training waits for data",
        f"{share:.0%} of each step goes into waiting for the next batch (perf/data_wait_share, median of steps "
        f"{waits.steps[0]} to {waits.steps[-1]}); without it training would be {1 / (1 - share):.1f} times as fast.",
        [
            Cause("Reading or transforming a batch takes longer than a step: let processes do it ahead.", change),
            Cause(
                f"data.cache_dir ({history.key('data.cache_dir')}) is on a slow disk: copy it to a local one.",
                [Change("data.cache_dir", history.key("data.cache_dir"), "/tmp/data_cache", note="any local disk")],
            ),
        ],
        steps=robust.span(waits),
    )  # fmt: skip


@rule
def slow_rank(history: History) -> Iterator[Finding]:
    """One rank for which all others wait."""
    ratio, which = expected.steady(history, "rank/slowest_over_median"), expected.steady(history, "rank/slowest")
    if len(ratio) < MIN_POINTS or len(which) != len(ratio):
        return
    ranks, counts = np.unique(which.values.astype(int), return_counts=True)
    rank = int(ranks[np.argmax(counts)])
    of_it = ratio[which.values == rank]
    times = robust.median(of_it.values)
    if counts.max() < SAME_RANK * len(which) or times < SLOW_RANK:
        return
    hosts = history.fact("machine.hosts") or []
    host = f" on {hosts[rank]}" if rank < len(hosts) else ""
    slowest_s = robust.median(expected.steady(history, "rank/slowest_step_s").values)
    wait_s = robust.median(expected.wait_s(history))  # rank 0's
    causes = [
        Cause(f"The machine{host} has another job, a failing disk, or a core too few: look at it, or leave it out."),
        Cause("Its share of the data takes longer: rows of another kind, or a slower disk."),
    ]
    if rank == 0 and wait_s > (1 - 1 / times) * slowest_s / 2:
        causes.reverse()
    if robust.tail(history.metrics["gpu/throttled"].finite()) > 0:  # NaN, where there are no GPUs, is not
        causes.insert(0, Cause("Its GPU's clocks are held down: cooling or power (gpu/temperature_c, gpu/throttled)."))
    yield Finding(
        "slow_rank", "warning", "certain" if counts.max() >= 0.9 * len(which) and times > 1.5 else "likely",
        f"all ranks wait for rank {rank}{host}",
        f"Rank {rank}{host} takes {times:.2f} times the median rank's own time, and was the slowest at "
        f"{counts.max()} of {len(which)} log steps.",
        causes,
        steps=robust.span(of_it), ranks=[rank], explains=("waits_for_others", "waits_for_data"),
    )  # fmt: skip


@rule
def gets_slower(history: History) -> Iterator[Finding]:
    step = expected.steady(history, "perf/step_s")
    if len(step) < 2 or step.times[-1] - step.times[0] < LONG_S:
        return
    if len(step) < 5 * MIN_POINTS or robust.tail(step) < SLOWER * robust.head(step) or robust.rising_share(step) < 0.85:
        return
    hot = history.metrics["gpu/throttled"].finite()
    causes = [
        Cause("Something piles up from step to step: a list that is kept, a growing log, memory that is swapped."),
        Cause("Another job on the machine, or a file server under load."),
    ]
    if len(hot) and robust.tail(hot) > 0:
        causes.insert(0, Cause("GPUs' clocks are held down: cooling or power (gpu/temperature_c)."))
    yield Finding(
        "gets_slower", "warning", "likely", "steps take longer and longer",
        f"perf/step_s went from {robust.head(step):.3g} to {robust.tail(step):.3g} between steps {step.steps[0]} and "
        f"{step.steps[-1]}.",
        causes,
        steps=robust.span(step),
    )  # fmt: skip


@rule
def tiny_micro_batch(history: History) -> Iterator[Finding]:
    """Many small forwards where a few larger ones would fit."""
    changes = larger_micro_batch(history)
    tokens = (history.key("data.micro_batch_size") or 0) * (history.key("data.seq_len") or 0)
    least = FEW_TOKENS["gpu" if _on_gpu(history) else "cpu"]
    if not changes or not tokens or tokens >= least or expected.last_step(history) < 1:
        return
    accumulation = history.fact("data.accumulation")
    share = history.metrics["memory/peak_share"].finite()
    told = f", and memory is at {share.last:.0%}" if len(share) else ""
    yield Finding(
        "tiny_micro_batch", "warning" if accumulation >= 4 else "info", "likely", "micro-batches are tiny",
        f"A step is made of {accumulation} forwards of {tokens} tokens each{told}.",
        [Cause("The same global batch in fewer, larger parts costs fewer launches.", changes)],
    )  # fmt: skip


@rule
def fp32_on_bf16(history: History) -> Iterator[Finding]:
    precision = str(history.key("trainer.precision") or "32-true")
    if not history.fact("machine.supports_bf16") or not _on_gpu(history) or not precision.startswith("32"):
        return
    yield Finding(
        "fp32_on_bf16", "warning", "certain", "training runs in fp32 on a GPU that has bf16",
        f"trainer.precision is {precision} on {history.fact('machine.device')}: products run several times slower.",
        [Cause("No precision is set.", [Change("trainer.precision", precision, "bf16-mixed")])],
    )  # fmt: skip


@rule
def eager_attention(history: History) -> Iterator[Finding]:
    if history.fact("model.attention") != "eager" or expected.last_step(history) < 1:
        return
    length = history.key("data.seq_len") or 0
    yield Finding(
        "eager_attention", "warning" if _on_gpu(history) or length >= 1024 else "info", "certain", "attention is eager",
        f"Each layer writes and keeps {length} x {length} scores a head.",
        [Cause("The model asks for it.", [Change("model.architecture.attn_implementation", "eager", "sdpa")])],
    )  # fmt: skip


@rule
def not_compiled(history: History) -> Iterator[Finding]:
    mfu = expected.steady(history, "perf/mfu")
    if history.fact("training.compiled") is not False or not _on_gpu(history) or len(mfu) < MIN_POINTS:
        return
    if robust.median(mfu.values) >= LOW_MFU:
        return
    yield Finding(
        "not_compiled", "info", "likely", "blocks are not compiled",
        f"perf/mfu is {robust.median(mfu.values):.0%}; torch.compile gives 16 to 27 % more in published runs.",
        [Cause("It is off.", [Change("model.blocks.compile", False, True)])],
    )  # fmt: skip


@rule
def clocks_held_down(history: History) -> Iterator[Finding]:
    held = expected.steady(history, "gpu/throttled")
    if len(held) < MIN_POINTS or robust.median(held.values) <= 0:
        return
    heat = history.metrics["gpu/temperature_c"].finite()
    yield Finding(
        "clocks_held_down", "warning", "certain", "GPUs' clocks are held down",
        f"Of {robust.median(held.values):.0%} of the ranks"
        + (f"; the hottest GPU has {heat.last:.0f} degrees." if len(heat) else "."),
        [Cause("Cooling, or the power limit: `nvidia-smi -q -d PERFORMANCE` on that machine names it.")],
        steps=robust.span(held),
    )  # fmt: skip
