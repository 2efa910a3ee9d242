"""Divides the memory of a rank that ran out into parts, and proposes changes that free some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...observe.history.run import History
from ...parallel.facts import Saving
from ...records import GIB
from .finding import Cause, Change
from .memory import Estimate

SPARE = 0.05  # of the device: left free for the allocator and collectives
UNDERCOUNTED = 1.6  # real activations over the estimate, at most (test_diagnosis_memory.py)
WORTH = 0.01  # of the memory in use: what frees less is not proposed
LOSS_CHUNK = 4096  # default of the LanguageModule
PER_TOKEN = ("activations", "logits")  # parts that grow with the micro-batch


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

    def frees(self, changes: Mapping[str, Any]) -> float:
        """Returns the bytes that the run needs less with these values of keys."""
        changed = Estimate(self.history, dict(changes))
        now, then = Estimate(self.history).parts(), changed.parts()
        freed = 0.0
        for part in now | then:
            before, after = now.get(part, 0.0), then.get(part, 0.0)
            if part in PER_TOKEN and before:  # the estimate gives only the ratio
                freed += self.needed[part] * (1 - after / before)
            else:
                freed += before - after
        return freed


def memory_use(history: History, memory: dict[str, Any], phase: str = "", is_first: bool = False) -> MemoryUse:
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
        GIB * (memory.get(f"{name}_gib") or 0.0) for name in ("used", "total", "asked", "outside", "pieces")
    )
    if not used:
        return MemoryUse(history, _sorted(estimated), estimated, limit)
    if is_first and not estimate.sharding.creates_state_at_start:
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
    enough = "enough, by estimate" if use.is_first else "enough by itself"
    for saving in _remedies(use, Estimate(use.history)):
        freed = use.frees({key: to for key, (_, to) in saving.changes.items()})
        if freed > WORTH * use.total:
            note = enough if freed >= use.missing > 0 else ""
            first, *more = [Change(key, *values) for key, values in saving.changes.items()]
            changes = [replace(first, saves_gib=freed / GIB, note=note), *more]
            found.append(Cause(saving.sentence, changes))
    if (unused := use.parts.get("fragmentation", 0.0)) > SPARE * use.total:
        sentence = (
            f"{unused / GIB:.1f} GiB are reserved but unused, between tensors of changing sizes:"
            " set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment."
        )
        found.append(Cause(sentence))
    return found


def _remedies(use: MemoryUse, estimate: Estimate) -> Iterator[Saving]:
    run, sharding = estimate.facts, estimate.sharding
    if not run.loss_chunk or run.loss_chunk > LOSS_CHUNK:
        sentence = "Logits for some tokens at a time: same loss curve, same speed."
        yield Saving(sentence, {"model.loss_chunk": (run.loss_chunk, LOSS_CHUNK)})
    if (size := run.micro_batch_size) > 1:
        to = _smaller_micro_batch(use, size)
        now = max(sharding.rows(run) // size, 1)
        sentence = (
            f"Smaller micro-batches, {size // to * now} accumulated instead of {now}: same global"
            " batch, same loss curve, a step takes somewhat longer."
        )
        yield Saving(sentence, {"data.micro_batch_size": (size, to)})
    savings = list(sharding.savings(run))
    yield from (saving for saving in savings if not saving.is_on_host)
    if use.history.fact("machine.supports_bf16") and not run.is_half:
        sentence = "Matrix products in bf16: faster; see docs/strategies/numerics.md."
        yield Saving(sentence, {"trainer.precision": (run.precision, "bf16-mixed")})
    if run.checkpointing != "full" and run.layers > 1:  # `full` works with every strategy
        sentence = "Activation checkpointing: backward recomputes each block, about a third more compute, same loss."
        yield Saving(sentence, {"model.blocks.checkpointing": (run.checkpointing, "full")})
    if not run.on_host:
        yield from (saving for saving in savings if saving.is_on_host)
    if (length := run.seq_len) >= 128:
        sentence = "Shorter sequences: a different training, with less context and half the tokens."
        yield Saving(sentence, {"data.seq_len": (length, length // 2)})


def _smaller_micro_batch(use: MemoryUse, size: int) -> int:
    """Returns the largest divisor that fits, else 1: the global batch stays a multiple."""
    smaller = [each for each in range(size - 1, 0, -1) if size % each == 0]
    for each in smaller:
        if use.frees({"data.micro_batch_size": each}) >= use.missing:
            return each
    return smaller[-1]
