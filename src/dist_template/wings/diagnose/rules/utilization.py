"""Rules about GPUs that could do more: idle ones, with the cause, and slow kernels.

`gpu/utilization` is the share of time in which any kernel runs. A rank that waits for others in a
collective of NCCL runs one, so a slow rank shows in `gpu/utilization_min` alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from ....parallel.spec import Spec, spec_of
from ....parallel.spec.facts import Facts, Sent
from ...history import History
from .. import expected, robust
from ..finding import Cause, Change, Finding
from ..memory import figures_of
from . import resources

MIN_POINTS = 4  # log steps after the first
# A step that is supplied with data and kernels runs one more than 0.95 of the time. Log steps,
# validations and checkpoints take up to a tenth; below this a fifth of the GPU hours is lost.
LOW = 0.8
LOW_ONE = 0.6  # the same for the least utilized GPU: the least of many noisy values is lower
VERY_LOW = 0.5
WITHIN, BETWEEN = 300e9, 40e9  # bytes per second of a rank in a node and between: `plan`'s defaults
COMMUNICATION = 0.3  # of a step; less is hidden, or within the error of these speeds
HOST, UPDATED = 25e9, 5e8  # bytes, and updated parameters, per second of a host: `plan`'s
ROOMY = 0.6  # of the device's memory in use: a larger micro-batch fits
FILLED = 0.85  # of the memory, with the proposed micro-batch
SLOW_KERNELS = 0.2  # MFU; a dense model in bf16 reaches 0.3 to 0.55


@dataclass(frozen=True)
class Idle:
    """A reason for which GPUs are idle."""

    share: float  # of a step's time, measured or estimated; sorts the reasons
    title: str  # in a few words
    evidence: str
    causes: list[Cause]
    rules: tuple[str, ...] = ()  # whose findings say the same
    ranks: tuple[int, ...] = ()


def gpu_utilization_low(history: History) -> Iterator[Finding]:
    """Reports idle GPUs, with the reasons that other metrics show, the largest first."""
    mean = expected.steady(history, "gpu/utilization")
    least = expected.steady(history, "gpu/utilization_min")
    if len(mean) < MIN_POINTS:
        return
    usual, worst = robust.median(mean.values), robust.median(least.values)  # NaN: one GPU
    if usual >= LOW and not worst < LOW_ONE:
        return
    evidence = f"A kernel runs {usual:.0%} of the time (median of gpu/utilization)"
    if worst < usual:
        evidence += f", on the least utilized GPU {worst:.0%}"
    found = sorted(_reasons(history), key=lambda reason: -reason.share)
    title, causes = "GPUs are idle", [cause for reason in found for cause in reason.causes]
    if found:
        title = f"{title}: {found[0].title}"
    else:
        title = f"{title}, and no measured cause explains it"
    # A kernel's start costs the host some microseconds, whatever else is wrong.
    causes += _small_kernels(history, is_first=not found)
    shows = "A profile shows what the host does between kernels"
    if history.key("trainer.profiler"):
        causes.append(Cause(f"{shows}: the run has written one (trainer.profiler)."))
    else:
        causes.append(Cause(f"{shows}.", [Change("config", None, "preset/profile")]))
    confidence = "certain" if min(usual, worst if worst < usual else usual) < VERY_LOW else "likely"
    yield Finding(
        "gpu_utilization_low",
        "warning",
        confidence,
        title,
        " ".join([f"{evidence}.", *(reason.evidence for reason in found)]),
        causes,
        robust.span(mean),
        [rank for reason in found for rank in reason.ranks],
        tuple(rule for reason in found for rule in reason.rules),
    )


def _reasons(history: History) -> Iterator[Idle]:
    waits = robust.median(expected.steady(history, "perf/data_wait_share").values)
    slower = robust.median(expected.steady(history, "rank/slowest_over_median").values)
    seconds, total_s = history.goodput, sum(history.goodput.values()) or 1.0
    shares = {
        resources.waits_for_data: waits,
        resources.slow_rank: 1 - 1 / slower if slower > 1 else 0.0,
        resources.checkpoint_overhead_high: seconds.get("checkpoint", 0.0) / total_s,
        resources.validation_overhead_high: seconds.get("validation", 0.0) / total_s,
    }
    for rule, share in shares.items():
        for one in rule(history):
            names = (one.rule, *one.explains)
            yield Idle(share, one.title, one.evidence, [*one.causes], names, tuple(one.ranks))
    yield from _communication(history)


def _communication(history: History) -> Iterator[Idle]:
    """Yields the estimated time of messages, and of a host that updates offloaded weights."""
    step_s = expected.step_s(history)
    if not history.fact("parameters.total") or not step_s > 0:
        return
    spec, facts = figures_of(history)
    updated, fetched = spec.on_host(facts)
    fetches = 2 * spec.accumulation(facts) * spec.used_bytes(facts) * fetched
    host_s = updated * (2 * spec.weight_bytes(facts) / HOST + 1 / UPDATED) + fetches / HOST
    if host_s >= COMMUNICATION * step_s:
        evidence = f"The host updates offloaded weights for {host_s:.2g} of {step_s:.2g} s a step"
        causes = [Cause("The optimizer runs on the host.", _without_offload(history))]
        share = min(host_s / step_s, 1.0)
        yield Idle(share, "the host updates the weights", f"{evidence} (estimate).", causes)
    messages = [*spec.traffic(facts)]
    sent_s = _seconds(history, messages)
    if sent_s >= COMMUNICATION * step_s:
        evidence = (
            f"Messages between ranks take {sent_s:.2g} of {step_s:.2g} s a step (estimate, at"
            f" {WITHIN / 1e9:.0f} GB/s in a node and {BETWEEN / 1e9:.0f} GB/s between nodes)."
        )
        causes = [*_less_communication(history, spec, facts, messages)]
        yield Idle(min(sent_s / step_s, 1.0), "ranks wait for messages", evidence, causes)


def _per_node(history: History) -> int:
    ranks = history.fact("machine.world_size") or 1
    return max(ranks // len(set(history.fact("machine.hosts") or [None])), 1)


def _seconds(history: History, messages: list[Sent]) -> float:
    per_node = _per_node(history)
    return sum(one.sent / (WITHIN if one.span <= per_node else BETWEEN) for one in messages)


def _less_communication(
    history: History, spec: Spec, facts: Facts, messages: list[Sent]
) -> Iterator[Cause]:
    """Yields changes with fewer messages for the same samples, if they would help."""
    now_s = _seconds(history, messages)
    size, accumulated = facts.micro_batch_size, spec.accumulation(facts)
    if accumulated > 1:
        larger = {"data.micro_batch_size": 2 * size}
        changed, figures = figures_of(history, larger)
        if _seconds(history, [*changed.traffic(figures)]) < 0.9 * now_s:
            yield Cause(
                "Weights are gathered for each micro-batch: larger ones, fewer accumulated, gather"
                " them less often.",
                [Change("data.micro_batch_size", size, 2 * size)],
            )
    per_node = _per_node(history)
    gathers = [one for one in messages if one.kind == "all_gather" and one.span > per_node]
    if gathers and history.fact("training.strategy") == "MeshStrategy":
        yield Cause(
            "Weights are gathered between nodes: HSDP shards them within a node and sends gradients"
            " alone between nodes.",
            [Change("config", None, "strategy/hsdp")],
        )
    if facts.global_batch_size:
        total = facts.global_batch_size
        yield Cause(
            "Each step sends the gradients once, however many samples it has: a larger global"
            " batch needs fewer steps, and another learning rate.",
            [Change("data.global_batch_size", total, 2 * total)],
        )
    yield Cause("The network is slower than it should be: `preflight` measures each node's links.")


def _without_offload(history: History) -> list[Change]:
    arguments = "trainer.strategy.init_args"
    names = ("offload_optimizer", "offload_parameters", "cpu_offload")
    on = [key for key in (f"{arguments}.{name}" for name in names) if history.key(key) is True]
    return [Change(key, True, False, "if memory allows") for key in on]


def _small_kernels(history: History, is_first: bool) -> Iterator[Cause]:
    """Yields causes of kernels that end before the host has started the next."""
    change = larger_micro_batch(history)
    share = robust.median(expected.steady(history, "memory/peak_share").values)
    if change:
        yield Cause(
            f"A micro-batch is too small to keep the GPU busy, and {1 - share:.0%} of its memory is"
            " free: larger ones run the same kernels on more samples.",
            change,
        )
    if is_first:
        yield from expected.known_waits(history)
    compiles = history.key("model.blocks.compile")
    if compiles is False:
        sentence = "Compiled blocks have fewer, larger kernels."
        yield Cause(sentence, [Change("model.blocks.compile", False, True)])


def larger_micro_batch(history: History) -> list[Change]:
    """Proposes the largest doubling of the micro-batch that fits; [] if memory is well used, or not
    known. Activations grow with it, weights do not: memory in proportion is an upper bound."""
    share = robust.median(expected.steady(history, "memory/peak_share").values)
    size = history.number("data.micro_batch_size", 0)
    total = int(expected.highest(history.key("data.global_batch_size")))
    if not share < ROOMY or not size or not total:
        return []
    readers = spec_of(history.key("trainer.strategy")).data_parallel(
        history.fact("machine.world_size") or 1
    )
    accumulated = max(total // (size * readers), 1)
    times = 1
    while 2 * times * share <= FILLED and (accumulated == 1 or accumulated % (2 * times) == 0):
        times *= 2
    if times == 1:
        return []
    to = times * size
    if accumulated > 1:
        return [Change("data.micro_batch_size", size, to, "same global batch, fewer accumulated")]
    return [
        Change("data.micro_batch_size", size, to),
        Change("data.global_batch_size", total, times * total, "and another learning rate"),
    ]


def gpu_compute_slow(history: History) -> Iterator[Finding]:
    """Reports busy GPUs that compute little: slow kernels."""
    mfu = expected.steady(history, "perf/mfu")
    usual = robust.median(mfu.values)
    if len(mfu) < MIN_POINTS or not usual < SLOW_KERNELS:
        return
    causes = []
    if history.key("model.attention") == "eager":
        faster = [Change("model.attention", "eager", "sdpa")]
        note = "Eager attention writes all scores to memory; sdpa runs flash attention's kernels."
        causes.append(Cause(note, faster))
    if change := larger_micro_batch(history):
        sentence = "Micro-batches are small, and memory is free: matrix products are too small."
        causes.append(Cause(sentence, change))
    if history.key("model.blocks.checkpointing", "none") != "none" and change:
        now = history.key("model.blocks.checkpointing")
        sentence = "Blocks are computed twice though memory is free."
        causes.append(Cause(sentence, [Change("model.blocks.checkpointing", now, "none")]))
    if history.key("model.blocks.compile") is False:
        sentence = "Compiled blocks fuse what is between matrix products."
        causes.append(Cause(sentence, [Change("model.blocks.compile", False, True)]))
    if not causes:
        return
    evidence = f"perf/mfu is {usual:.1%}; 30 to 55 % is usual for a dense model in 16 bits."
    title, span = "the GPU computes far below its peak", robust.span(mfu)
    yield Finding("gpu_compute_slow", "warning", "likely", title, evidence, causes, span)
