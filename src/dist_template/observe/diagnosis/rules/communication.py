"""Ranks that spend their steps on each other, for as far as it can be told from the outside."""

from __future__ import annotations

from collections.abc import Iterator

from ...history.run import History
from .. import expected, robust
from ..causes import larger_micro_batch
from ..engine import rule
from ..finding import Cause, Change, Finding

MIN_POINTS = 4
OVERHEAD = 0.4  # of a step is neither waiting for data nor computing
BACKWARD = 3.0  # times the forward: forward and backward together; 4 with full checkpointing
BUSY, LOW_MFU = 0.9, 0.15  # a GPU that waits in a collective counts as busy, and computes little
EMPTY = 0.4  # of the memory: below it less needs to be sharded


@rule
def waits_for_others(history: History) -> Iterator[Finding]:
    """By the time left of a step; or, where a forward holds collectives too, by GPUs that are busy and do little.

    The second cannot be told from slow kernels (fp32, eager attention), so it is silent where there are such.
    """
    step = expected.steady(history, "perf/step_s")
    if (history.fact("machine.world_size") or 1) < 2 or len(step) < MIN_POINTS:
        return
    evidence = _by_busy_gpus(history) if _shards_the_forward(history) else _by_time(history)
    if evidence:
        yield Finding(
            "waits_for_others", "warning", "possible", "ranks spend much of a step on each other",
            f"{evidence} (steps {step.steps[0]} to {step.steps[-1]}).", list(_causes(history)), robust.span(step),
        )  # fmt: skip


def _shards_the_forward(history: History) -> bool:
    """FSDP2, tensor and expert parallelism, ZeRO-3."""
    return "Mesh" in history.fact("training.strategy", "") or (history.key("trainer.strategy.stage") or 0) > 2


def _by_time(history: History) -> str | None:
    own = expected.steady(history, "rank/slowest_step_s")
    if len(own) < MIN_POINTS:
        return None
    step_s = robust.median(expected.steady(history, "perf/step_s").values)
    wait_s = robust.median(expected.wait_s(history))
    forward_s = max(robust.median(own.values) - wait_s, 0)
    rest = 1 - (wait_s + (BACKWARD + (history.key("model.blocks.checkpointing") == "full")) * forward_s) / step_s
    told = f"A step takes {step_s:.3g} s, waiting for data {wait_s:.2g} s, the forward {forward_s:.2g} s: with backward"
    return f"{told} {rest:.0%} is left for communication and the optimizer" if rest > OVERHEAD else None


def _by_busy_gpus(history: History) -> str | None:
    busy, mfu = expected.steady(history, "gpu/utilization"), expected.steady(history, "perf/mfu")
    slow = str(history.key("trainer.precision")).startswith("32") or history.fact("model.attention") == "eager"
    if slow or len(busy) < MIN_POINTS or len(mfu) < MIN_POINTS:
        return None
    share, done = robust.median(busy.values), robust.median(mfu.values)
    return f"GPUs are busy {share:.0%} of the time at {done:.0%} MFU" if share > BUSY and done < LOW_MFU else None


def _causes(history: History) -> Iterator[Cause]:
    """By strategy: what it sends, and which sends less."""
    world, nodes = history.fact("machine.world_size") or 1, len(set(history.fact("machine.hosts") or [None]))
    strategy, tp = "trainer.strategy", history.key("trainer.strategy.tp_size") or 1
    stage, share = history.key(f"{strategy}.stage") or 0, history.metrics["memory/peak_share"].finite()
    if isinstance(tp, int) and tp > world // nodes:
        fewer = [Change(f"{strategy}.tp_size", tp, world // nodes)]
        yield Cause("Tensor parallelism reaches over nodes: each layer waits for the network twice.", fewer)
    if stage == 3 and len(share) and share.last < EMPTY:
        yield Cause("ZeRO-3 gathers every parameter in forward and in backward; ZeRO-2 would fit.",
                    [Change(f"{strategy}.stage", 3, 2)])  # fmt: skip
    if (
        "Mesh" in history.fact("training.strategy", "")
        and nodes > 1
        and history.key(f"{strategy}.dp_replicate_size") == 1
    ):
        replicas = [Change(f"{strategy}.dp_replicate_size", 1, nodes)]
        yield Cause("Parameters are gathered over all nodes: HSDP gathers them within one.", replicas)
    size = history.key("data.global_batch_size")
    larger = larger_micro_batch(history) or ([Change("data.global_batch_size", size, 2 * size)] if size else [])
    yield Cause("Each exchange has too little work beside it: more tokens a forward, or a step.", larger)
    yield Cause(
        "The network between ranks is slow: NCCL_DEBUG=INFO names the transport, `doctor` looks at the machine."
    )
