"""Divides the memory of a rank that ran out into parts, and proposes changes that free some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...observe.history.run import History
from ...parallel.estimates.facts import Saving
from ...records import GIB
from .finding import Cause, Change
from .memory import Estimate

SPARE = 0.05  # of the device: left free for the allocator and collectives
UNDERCOUNTED = 1.6  # real activations over the estimate, at most (test_diagnosis_memory.py)
WORTH = 0.01  # of the memory in use: what frees less is not proposed
LOSS_CHUNK = 4096  # default of the LanguageModule
MEASURED = ("used", "total", "asked", "outside", "pieces")  # by callbacks/crash.py
PER_TOKEN = ("activations", "logits")  # parts that grow with the micro-batch


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a rank in bytes, by part."""

    history: History
    parts: dict[str, float]  # in use, the largest first
    needed: dict[str, float]  # by a complete step: measured or estimated, whichever is more
    limit: float = 0.0  # of the device, or of the process; 0: not known
    is_first: bool = False  # no step had been completed, so that `needed` is partly estimated

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

    `memory` is what callbacks/crash.py recorded, `phase` in which the rank ran out of memory. `is_first`: no optimizer
    step had been completed, which creates AdamW's state.
    """
    estimate = Estimate(history)
    estimated, parts = estimate.parts(), estimate.state()
    measured = {name: GIB * (memory.get(f"{name}_gib") or 0.0) for name in MEASURED}
    used, limit = measured["used"], measured["total"]
    if not used:
        return MemoryUse(history, _sorted(estimated), estimated, limit)
    if is_first and not estimate.sharding.creates_state_at_start:
        parts["optimizer state"] = 0.0
        if phase == "forward":
            parts["gradients"] = 0.0
    parts |= {"outside of torch": measured["outside"], "fragmentation": measured["pieces"]}
    rest = max(0.0, used - sum(parts.values()))
    per_token = max(estimated["activations"] + estimated["logits"], 1.0)
    step = rest + measured["asked"]
    if is_first:
        step = max(step, UNDERCOUNTED * per_token)
    needed = parts | estimate.state()
    for part in PER_TOKEN:
        share = estimated[part] / per_token
        parts[part], needed[part] = rest * share, step * share
    return MemoryUse(history, _sorted(parts), needed, limit, is_first)


def _sorted(parts: dict[str, float]) -> dict[str, float]:
    """Returns the parts that are not empty, the largest first."""
    return {name: parts[name] for name in sorted(parts, key=lambda name: -parts[name]) if parts[name] > 0}


def remedies(use: MemoryUse) -> list[Cause]:
    """Returns remedies that are not in effect and that limits/ accepts, the cheapest first."""
    found = []
    enough = "enough, by estimate" if use.is_first else "enough by itself"
    for saving in _remedies(use, Estimate(use.history)):
        changes = [Change(key, *values) for key, values in saving.changes.items()]
        freed = use.frees({change.key: change.to for change in changes})
        if freed > WORTH * use.total:
            note = enough if freed >= use.missing > 0 else ""
            changes[0] = replace(changes[0], saves_gib=freed / GIB, note=note)
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
        more = f"{size // to * now} accumulated instead of {now}"
        sentence = f"Smaller micro-batches, {more}: same global batch, same loss curve, a step takes somewhat longer."
        yield Saving(sentence, {"data.micro_batch_size": (size, to)})
    for saving in sharding.savings(run):
        if not saving.is_on_host:
            yield saving
    if use.history.fact("machine.supports_bf16") and not run.is_half:
        sentence = "Matrix products in bf16: faster; see docs/strategies/numerics.md."
        yield Saving(sentence, {"trainer.precision": (run.precision, "bf16-mixed")})
    if run.checkpointing != "full" and run.layers > 1:  # `full` works with every strategy
        sentence = "Activation checkpointing: backward recomputes each block, about a third more compute, same loss."
        yield Saving(sentence, {"model.blocks.checkpointing": (run.checkpointing, "full")})
    for saving in sharding.savings(run):
        if saving.is_on_host and not run.on_host:
            yield saving
    if (length := run.seq_len) >= 128:
        sentence = "Shorter sequences: a different training, with less context and half the tokens."
        yield Saving(sentence, {"data.seq_len": (length, length // 2)})


def _smaller_micro_batch(use: MemoryUse, size: int) -> int:
    """Returns the largest divisor that fits, else 1: the global batch stays a multiple."""
    for smaller in range(size - 1, 1, -1):
        if size % smaller == 0 and use.frees({"data.micro_batch_size": smaller}) >= use.missing:
            return smaller
    return 1
