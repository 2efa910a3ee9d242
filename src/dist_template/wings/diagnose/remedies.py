"""Divides the memory of a rank that ran out into parts, and proposes changes that free some."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...parallel.spec.facts import Saving
from ..history import History
from ..values import GIB
from .finding import Cause, Change
from .memory import figures_of, parts_of

SPARE = 0.05  # of the device: left free for the allocator and collectives
UNDERCOUNTED = 1.6  # real activations over the estimate, at most (test_diagnosis_faults.py)
WORTH = 0.01  # of the memory in use: what frees less is not proposed
LOSS_CHUNK = 4096  # default of the LanguageModule
MEASURED = ("used", "total", "asked", "outside", "pieces")  # by callbacks/crash.py
PER_TOKEN = ("activations", "logits")  # parts that grow with the micro-batch


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a rank in bytes, by part."""

    history: History
    parts: dict[str, float]  # in use
    needed: dict[str, float]  # by a complete step: measured or estimated, whichever is more
    limit: float  # of the device, or of the process; 0: not known
    is_first: bool = False  # no step had been completed, so that `needed` is partly estimated

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def missing(self) -> float:
        """Bytes that must be freed for a step to fit; 0 if not known."""
        if not self.limit:
            return 0.0
        needed = sum(self.needed.values())
        return max(0.0, needed - (1 - SPARE) * self.limit)

    def frees(self, changes: dict[str, Any]) -> float:
        """Returns the bytes that the run needs less with these values of keys."""
        now, then = parts_of(self.history), parts_of(self.history, changes)
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
    `memory` is what callbacks/crash.py recorded, `phase` in which the rank ran out of memory.
    `is_first`: no optimizer step had been completed, which creates AdamW's state."""
    spec, run = figures_of(history)
    estimated, parts = parts_of(history), spec.state(run)
    measured = dict.fromkeys(MEASURED, 0.0)
    for name in MEASURED:
        size_gib = memory.get(f"{name}_gib")
        if size_gib is not None:
            measured[name] = GIB * size_gib
    used, limit = measured["used"], measured["total"]
    if not used:
        return MemoryUse(history, estimated, estimated, limit)
    if is_first and not spec.creates_state_at_start:
        parts["optimizer state"] = 0.0
        if phase == "forward":
            parts["gradients"] = 0.0
    parts |= {"outside of torch": measured["outside"], "fragmentation": measured["pieces"]}
    rest = max(0.0, used - sum(parts.values()))
    per_token = max(estimated["activations"] + estimated["logits"], 1.0)
    step = rest + measured["asked"]
    if is_first:
        step = max(step, UNDERCOUNTED * per_token)
    needed = parts | spec.state(run)
    for part in PER_TOKEN:
        share = estimated[part] / per_token
        parts[part], needed[part] = rest * share, step * share
    return MemoryUse(history, parts, needed, limit, is_first)


def remedies(use: MemoryUse) -> list[Cause]:
    """Returns remedies that are not in effect, the least expensive first."""
    found = []
    if not use.history.is_text:
        found += _smaller_batch(use.history)
    for saving in _savings(use):
        if not use.history.is_text and not all(map(use.history.has_key, saving.changes)):
            continue
        freed = use.frees({key: to for key, (_, to) in saving.changes.items()})
        if freed <= WORTH * use.total:
            continue
        note = f"frees {freed / GIB:.1f} GiB"
        if freed >= use.missing > 0:
            note += ", enough, by estimate" if use.is_first else ", enough by itself"
        changes = []
        for key, (now, to) in saving.changes.items():
            changes.append(Change(key, now, to, note))
            note = ""  # the first change of a cause has the note
        found.append(Cause(saving.sentence, changes))
    unused = use.parts.get("fragmentation", 0.0)
    if unused > SPARE * use.total:
        sentence = f"{unused / GIB:.1f} GiB are reserved but unused, between tensors: set"
        variable = "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
        found.append(Cause(f"{sentence} {variable}."))
    return found


def _smaller_batch(history: History) -> Iterator[Cause]:
    """Yields smaller batches with the same global batch, for a data module of a user's that has
    the usual key."""
    size = history.number("data.batch_size")
    accumulated = history.number("trainer.accumulate_grad_batches", 1)
    if size > 1 and not size % 2 and not history.fact("training.is_manual"):
        changes = [
            Change("data.batch_size", size, size // 2),
            Change("trainer.accumulate_grad_batches", accumulated, 2 * accumulated),
        ]
        yield Cause("Smaller batches, accumulated: the same global batch.", changes)


def _savings(use: MemoryUse) -> Iterator[Saving]:
    spec, run = figures_of(use.history)
    can_chunk = use.history.fact("objective.in_chunks", True)
    if can_chunk and (not run.loss_chunk or run.loss_chunk > LOSS_CHUNK):
        sentence = "Logits for some tokens at a time: same loss curve, same speed."
        yield Saving(sentence, {"model.loss_chunk": (run.loss_chunk, LOSS_CHUNK)})
    size = run.micro_batch_size
    if size > 1:
        # The largest divisor that fits, else 1: the global batch stays a multiple.
        to = size - 1
        while to > 1 and (size % to or use.frees({"data.micro_batch_size": to}) < use.missing):
            to -= 1
        now = max(spec.rows(run) // size, 1)
        more = f"{size // to * now} accumulated instead of {now}"
        sentence = (
            f"Smaller micro-batches, {more}: same global batch, same loss curve, a step takes"
            " somewhat longer."
        )
        yield Saving(sentence, {"data.micro_batch_size": (size, to)})
    savings = list(spec.savings(run))
    yield from filter(lambda saving: not saving.is_on_host, savings)
    if use.history.fact("machine.supports_bf16") and not run.is_half:
        sentence = "Matrix products in bf16: faster; see docs/strategies/numerics.md."
        yield Saving(sentence, {"trainer.precision": (run.precision, "bf16-mixed")})
    if run.checkpointing != "full" and run.layers > 1:  # `full` works with every strategy
        sentence = (
            "Activation checkpointing: backward recomputes each block, about a third more"
            " compute, same loss."
        )
        yield Saving(sentence, {"model.blocks.checkpointing": (run.checkpointing, "full")})
    if not run.on_host:
        yield from filter(lambda saving: saving.is_on_host, savings)
