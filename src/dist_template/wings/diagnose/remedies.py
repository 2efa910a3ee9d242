"""Divides the memory of a rank that ran out into parts, and proposes changes that free some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...observe.history.run import History
from ...records import GIB
from .finding import Cause, Change
from .memory import STRATEGY, Estimate

SPARE = 0.05  # of the device: left free for the allocator and collectives
UNDERCOUNTED = 1.6  # real activations over the estimate, at most (test_diagnosis_memory.py)
WORTH = 0.01  # of the memory in use: what frees less is not proposed
LOSS_CHUNK = 4096  # default of the LanguageModule
PER_TOKEN = ("activations", "logits")  # parts that grow with the micro-batch
ZERO_2 = Change("config", "ddp", "configs/strategy/zero2.yaml")
SLOWER = "the optimizer runs on the CPU, and steps take longer."


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a rank in bytes, by part.

    Args:
        history: Of the run.
        parts: In use, the largest first.
        needed: By a complete step: measured or estimated, whichever is more.
        limit: Of the device, or of the process. 0: not known.
        is_first: No step had been completed, so that `needed` is partly estimated.
    """

    history: History
    parts: dict[str, float]
    needed: dict[str, float]
    limit: float = 0.0
    is_first: bool = False

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def missing(self) -> float:
        """Bytes that must be freed for a step to fit; 0 if not known."""
        needed = sum(self.needed.values())
        return max(0.0, needed - (1 - SPARE) * self.limit) if self.limit else 0.0

    def frees(self, changes: Sequence[Change]) -> float:
        """Returns the bytes that the run needs less with these changes."""
        changed = Estimate(self.history, {change.key: change.to for change in changes})
        now, then = Estimate(self.history).parts(), changed.parts()
        freed = 0.0
        for part in now | then:
            before, after = now.get(part, 0.0), then.get(part, 0.0)
            if part in PER_TOKEN and before:  # the estimate gives only the ratio
                freed += self.needed[part] * (1 - after / before)
            else:
                freed += before - after
        return freed


def memory_use(
    history: History, memory: dict[str, Any], phase: str = "", is_first: bool = False
) -> MemoryUse:
    """Divides the measured memory of a rank into parts; if not measured, returns the estimate.

    Args:
        history: Of the run.
        memory: What callbacks/crash.py recorded.
        phase: In which the rank ran out of memory.
        is_first: No optimizer step had been completed: the first one creates AdamW's state.
    """
    estimate = Estimate(history)
    estimated, parts = estimate.parts(), estimate.state()
    used, limit, requested, outside, unused = (
        GIB * (memory.get(f"{name}_gib") or 0.0)
        for name in ("used", "total", "asked", "outside", "pieces")
    )
    if not used:
        return MemoryUse(history, _sorted(estimated), estimated, limit)
    if is_first and estimate.kind != "zero":  # DeepSpeed creates it at the start
        parts["optimizer state"] = 0.0
        if phase == "forward":
            parts["gradients"] = 0.0
    parts |= {"outside of torch": outside, "fragmentation": unused}
    rest = max(0.0, used - sum(parts.values()))
    per_token = max(sum(estimated[part] for part in PER_TOKEN), 1.0)
    step = max(rest + requested, UNDERCOUNTED * per_token if is_first else 0.0)
    shares = {part: estimated[part] / per_token for part in PER_TOKEN}
    in_use = parts | {part: rest * share for part, share in shares.items()}
    needed = parts | estimate.state() | {part: step * share for part, share in shares.items()}
    return MemoryUse(history, _sorted(in_use), needed, limit, is_first)


def _sorted(parts: dict[str, float]) -> dict[str, float]:
    return dict(sorted(((k, v) for k, v in parts.items() if v > 0), key=lambda part: -part[1]))


def remedies(use: MemoryUse) -> list[Cause]:
    """Returns remedies that are not in effect and that limits/ accepts, the cheapest first."""
    found = []
    for sentence, first, *more in _remedies(use, Estimate(use.history)):
        freed = use.frees([first, *more])
        if freed > WORTH * use.total:
            enough = "enough, by estimate" if use.is_first else "enough by itself"
            note = enough if freed >= use.missing > 0 else ""
            found.append(Cause(sentence, [replace(first, saves_gib=freed / GIB, note=note), *more]))
    if (unused := use.parts.get("fragmentation", 0.0)) > SPARE * use.total:
        sentence = (
            f"{unused / GIB:.1f} GiB are reserved but unused, between tensors of changing sizes:"
            " set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment."
        )
        found.append(Cause(sentence))
    return found


Remedy = tuple[str, Change] | tuple[str, Change, Change]  # what it does and costs, what to change


def _remedies(use: MemoryUse, run: Estimate) -> Iterator[Remedy]:
    if not run.loss_chunk or run.loss_chunk > LOSS_CHUNK:
        sentence = "Logits for some tokens at a time: same loss curve, same speed."
        yield sentence, Change("model.loss_chunk", run.loss_chunk, LOSS_CHUNK)
    if (size := run.micro_batch_size) > 1:
        to = _smaller_micro_batch(use, size)
        now = max(run.rows // size, 1)
        sentence = (
            f"Smaller micro-batches, {size // to * now} accumulated instead of {now}: same global"
            " batch, same loss curve, a step takes somewhat longer."
        )
        yield sentence, Change("data.micro_batch_size", size, to)
    if run.accumulates_full:
        sentence = "Gradients reduced in every micro-batch: more communication, same loss curve."
        yield sentence, Change(f"{STRATEGY}reduce_each_micro_batch", False, True)
    yield from _more_sharding(run)
    if use.history.fact("machine.supports_bf16") and not run.is_half:
        sentence = "Matrix products in bf16: faster; see docs/strategies/numerics.md."
        yield sentence, Change("trainer.precision", run.precision, "bf16-mixed")
    if run.checkpointing != "full" and run.layers > 1:  # `full` works with every strategy
        sentence = (
            "Activation checkpointing: backward recomputes each block, about a third more compute,"
            " same loss."
        )
        yield sentence, Change("model.blocks.checkpointing", run.checkpointing, "full")
    if not run.on_host:
        yield from _offload(run)
    if (length := run.seq_len) >= 128:
        sentence = "Shorter sequences: a different training, with less context and half the tokens."
        yield sentence, Change("data.seq_len", length, length // 2)


def _smaller_micro_batch(use: MemoryUse, size: int) -> int:
    """Returns the largest divisor that fits, else 1: the global batch stays a multiple."""
    smaller = [each for each in range(size - 1, 0, -1) if size % each == 0]
    for each in smaller:
        if use.frees([Change("data.micro_batch_size", size, each)]) >= use.missing:
            return each
    return smaller[-1]


def _more_sharding(run: Estimate) -> Iterator[Remedy]:
    """Yields the next stage of sharding, if there are ranks to shard over."""
    if run.ranks == 1:
        return
    if run.kind == "zero" and run.stage < 3:
        gathers = "weights are gathered in every forward and backward"
        cost = "same communication" if run.stage == 1 else gathers
        stage = Change(f"{STRATEGY}stage", run.stage, run.stage + 1)
        yield f"ZeRO stage {run.stage + 1}: {cost}.", stage
    elif run.kind == "replicated" and run.precision == "16-mixed":  # a mesh does not support it
        yield "ZeRO stage 2: shards optimizer state and gradients.", ZERO_2
    elif run.kind == "replicated":
        sentence = "FSDP2: each rank keeps a shard, and gathers a block when it runs."
        yield sentence, Change("config", "ddp", "configs/strategy/fsdp2.yaml")


def _offload(run: Estimate) -> Iterator[Remedy]:
    if run.kind == "mesh" and run.shards > run.tp and not run.offload_parameters:
        sentence = f"Parameters, gradients and optimizer state in host memory: {SLOWER}"
        yield sentence, Change(f"{STRATEGY}cpu_offload", False, True)
    elif run.kind == "zero" and not run.offload_optimizer:
        sentence = f"Optimizer state in host memory: {SLOWER}"
        yield sentence, Change(f"{STRATEGY}offload_optimizer", False, True)
    elif run.kind == "zero" and run.stage == 3 and not run.offload_parameters:
        sentence = "Parameters in host memory too: each is fetched when its module runs."
        yield sentence, Change(f"{STRATEGY}offload_parameters", False, True)
    elif run.kind == "replicated":
        sentence = f"ZeRO stage 2 with optimizer state in host memory: {SLOWER}"
        yield sentence, ZERO_2, Change(f"{STRATEGY}offload_optimizer", None, True)
