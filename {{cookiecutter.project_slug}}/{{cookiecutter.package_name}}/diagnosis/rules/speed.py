"""What makes training slower than it needs to be, for as far as it can be told from the outside."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...history.metrics import Series
from ...history.run import History
from .. import expected, robust
from ..engine import rule
from ..finding import Cause, Change, Finding

MIN_POINTS = 4  # log steps after the first, which holds the warming up of kernels, allocator and file cache
WAITS, WAITS_LONG = 0.1, 0.3  # of a step, for the next batch
AT_LEAST_S = 0.015  # a step; less is the loop itself, and the ranks' count of tokens, which small steps cannot hide
SLOW_RANK = 1.25  # times the median of the ranks; noise between equal machines is some hundredths
SAME_RANK = 0.7  # of the log steps in which the slowest rank is one and the same
SLOWER, LONG_S = 1.5, 60.0  # times the step time at the start; over a minute at least
OVERHEAD = 0.4  # of a step is neither waiting for data nor computing
BACKWARD = 3.0  # times the forward: forward and backward together; 4 with full checkpointing
FEW_TOKENS = {"cpu": 256, "gpu": 4096}  # of a micro-batch: below, kernels' launches cost more than their work
ROOM = 0.6  # of the memory: below it the micro-batch can be larger
LOW_MFU = 0.35  # published runs of dense models reach 0.4 to 0.56 on H100 (llm-foundry, litgpt)


def _steady(history: History, name: str) -> Series:
    """Without what was measured first."""
    return history.metrics[name].finite()[1:]


def _on_gpu(history: History) -> bool:
    return history.fact("machine.device", "cpu") != "cpu"


@rule
def waits_for_data(history: History) -> Iterator[Finding]:
    waits = _steady(history, "perf/data_wait_share")
    if len(waits) < MIN_POINTS:
        return
    share = robust.median(waits.values)
    wait_s = share * robust.median(_steady(history, "perf/step_s").values)
    if share < WAITS or wait_s < AT_LEAST_S:
        return
    workers, ranks = history.key("data.num_workers", 0), history.fact("machine.world_size") or 1
    hosts = len(set(history.fact("machine.hosts") or [None]))
    free = (history.environment.get("cpu_count") or 8) * hosts // ranks
    more = min(max(2 * workers, 2), max(free - 1, 1))
    change = [Change("data.num_workers", workers, more)] if more > workers else []
    yield Finding(
        "waits_for_data",
        "warning",
        "certain" if share >= WAITS_LONG else "likely",
        "training waits for data",
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
    )


@rule
def slow_rank(history: History) -> Iterator[Finding]:
    """One rank for which all others wait."""
    ratio, which = _steady(history, "rank/slowest_over_median"), _steady(history, "rank/slowest")
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
    throttled = (
        robust.tail(history.metrics["gpu/throttled"].finite()) > 0 if "gpu/throttled" in history.metrics else False
    )
    clocks = Cause("Its GPU's clocks are held down: cooling or power (gpu/temperature_c, gpu/throttled).")
    waits = robust.median(_steady(history, "perf/data_wait_share").values)
    causes = [
        Cause(f"The machine{host} has another job, a failing disk, or a core too few: look at it, or leave it out."),
        Cause("Its share of the data takes longer: rows of another kind, or a slower disk."),
    ]
    causes = causes[::-1] if waits > WAITS else causes
    yield Finding(
        "slow_rank",
        "warning",
        "certain" if counts.max() >= 0.9 * len(which) and times > 1.5 else "likely",
        f"all ranks wait for rank {rank}{host}",
        f"Rank {rank}{host} takes {times:.2f} times the median rank's own time, and was the slowest at "
        f"{counts.max()} of {len(which)} log steps.",
        [clocks, *causes] if throttled else causes,
        steps=robust.span(of_it),
        ranks=[rank],
        explains=("waits_for_others", "waits_for_data"),
    )


@rule
def waits_for_others(history: History) -> Iterator[Finding]:
    """What is left of a step once data and computing are taken off: gradients on their way between ranks.

    Only where a forward holds no collective (DDP, ZeRO-1 and 2): elsewhere its time is no measure of computing.
    """
    strategy = str(history.fact("training.strategy") or history.key("trainer.strategy", ""))
    world = history.fact("machine.world_size") or 1
    own, step = _steady(history, "rank/slowest_step_s"), _steady(history, "perf/step_s")
    stage = history.key("trainer.strategy.stage", 0)
    if world < 2 or "Mesh" in strategy or (stage or 0) > 2 or len(own) < MIN_POINTS or len(step) < MIN_POINTS:
        return
    step_s, own_s = robust.median(step.values), robust.median(own.values)
    wait_s = robust.median(_steady(history, "perf/data_wait_share").values) * step_s
    times = BACKWARD + (history.key("model.blocks.checkpointing") == "full")
    rest = 1 - (wait_s + times * max(own_s - wait_s, 0)) / step_s
    if rest < OVERHEAD:
        return
    size, micro = history.key("data.global_batch_size"), history.key("data.micro_batch_size")
    larger = [Change("data.global_batch_size", size, 2 * size)] if size else []
    ddp = [Change("config", None, "configs/strategy/zero1.yaml")] if "Zero" not in strategy else []
    alone = size and micro and size // micro // world > 1
    yield Finding(
        "waits_for_others",
        "warning",
        "possible",
        "ranks spend much of a step on each other",
        f"A step takes {step_s:.3g} s; data {wait_s:.2g} s, the forward {max(own_s - wait_s, 0):.2g} s; with "
        f"backward {rest:.0%} of it is left for communication and the optimizer.",
        [
            Cause(
                "Gradients are reduced at every micro-batch: take larger ones."
                if alone and stage
                else "Each step has too little work for the gradients it sends: more tokens a step.",
                _larger_micro_batch(history) or larger,
            ),
            Cause("The network between ranks is slow: see NCCL_DEBUG=INFO for the transport, and `doctor`."),
            Cause("Optimizer state fills each rank's step.", ddp),
        ],
        steps=robust.span(step),
    )


@rule
def gets_slower(history: History) -> Iterator[Finding]:
    step = _steady(history, "perf/step_s")
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
        "gets_slower",
        "warning",
        "likely",
        "steps take longer and longer",
        f"perf/step_s went from {robust.head(step):.3g} to {robust.tail(step):.3g} between steps {step.steps[0]} and "
        f"{step.steps[-1]}.",
        causes,
        steps=robust.span(step),
    )


@rule
def tiny_micro_batch(history: History) -> Iterator[Finding]:
    """Many small forwards where a few larger ones would fit."""
    changes = _larger_micro_batch(history)
    tokens = (history.key("data.micro_batch_size") or 0) * (history.key("data.seq_len") or 0)
    least = FEW_TOKENS["gpu" if _on_gpu(history) else "cpu"]
    if not changes or not tokens or tokens >= least or expected.last_step(history) < 1:
        return
    accumulation = history.fact("data.accumulation")
    share = history.metrics["memory/peak_share"].finite()
    told = f", and memory is at {share.last:.0%}" if len(share) else ""
    yield Finding(
        "tiny_micro_batch",
        "warning" if accumulation >= 4 else "info",
        "likely",
        "micro-batches are tiny",
        f"A step is made of {accumulation} forwards of {tokens} tokens each{told}.",
        [Cause("The same global batch in fewer, larger parts costs fewer launches.", changes)],
    )


def _larger_micro_batch(history: History) -> list[Change]:
    """As large as memory allows by what the present one takes, and the accumulation can give."""
    size, accumulation = history.key("data.micro_batch_size"), history.fact("data.accumulation") or 1
    share = history.metrics["memory/peak_share"].finite()
    room = ROOM / max(share.last, 0.01) if len(share) else 4.0
    times = max((each for each in range(1, accumulation + 1) if accumulation % each == 0 and each <= room), default=1)
    return [Change("data.micro_batch_size", size, times * size)] if size and times > 1 else []


@rule
def fp32_on_bf16(history: History) -> Iterator[Finding]:
    precision = str(history.key("trainer.precision") or "32-true")
    if not history.fact("machine.supports_bf16") or not _on_gpu(history) or not precision.startswith("32"):
        return
    yield Finding(
        "fp32_on_bf16",
        "warning",
        "certain",
        "training runs in fp32 on a GPU that has bf16",
        f"trainer.precision is {precision} on {history.fact('machine.device')}: products run several times slower.",
        [Cause("No precision is set.", [Change("trainer.precision", precision, "bf16-mixed")])],
    )


@rule
def eager_attention(history: History) -> Iterator[Finding]:
    if history.fact("model.attention") != "eager" or expected.last_step(history) < 1:
        return
    length = history.key("data.seq_len") or 0
    yield Finding(
        "eager_attention",
        "warning" if _on_gpu(history) or length >= 1024 else "info",
        "certain",
        "attention is eager",
        f"Each layer writes and keeps {length} x {length} scores a head.",
        [Cause("The model asks for it.", [Change("model.architecture.attn_implementation", "eager", "sdpa")])],
    )


@rule
def not_compiled(history: History) -> Iterator[Finding]:
    mfu = _steady(history, "perf/mfu")
    if history.fact("training.compiled") is not False or not _on_gpu(history) or len(mfu) < MIN_POINTS:
        return
    if robust.median(mfu.values) >= LOW_MFU:
        return
    yield Finding(
        "not_compiled",
        "info",
        "likely",
        "blocks are not compiled",
        f"perf/mfu is {robust.median(mfu.values):.0%}; torch.compile gives 16 to 27 % more in published runs.",
        [Cause("It is off.", [Change("model.blocks.compile", False, True)])],
    )


@rule
def clocks_held_down(history: History) -> Iterator[Finding]:
    held = _steady(history, "gpu/throttled")
    if len(held) < MIN_POINTS or robust.median(held.values) <= 0:
        return
    heat = history.metrics["gpu/temperature_c"].finite()
    yield Finding(
        "clocks_held_down",
        "warning",
        "certain",
        "GPUs' clocks are held down",
        f"Of {robust.median(held.values):.0%} of the ranks"
        + (f"; the hottest GPU has {heat.last:.0f} degrees." if len(heat) else "."),
        [Cause("Cooling, or the power limit: `nvidia-smi -q -d PERFORMANCE` on that machine names it.")],
        steps=robust.span(held),
    )
