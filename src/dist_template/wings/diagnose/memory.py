"""Estimates a run's memory, with its own keys or with changed ones; without torch.

1  `figures_of` collects what memory depends on: facts that the run recorded, keys of its
   configuration, and the changes of keys that a rule proposes.
2  The run's strategy turns these figures into bytes of parameters, gradients, optimizer state,
   activations and logits (`parts_of`).

`parallel/spec/` has the formulas; tests/wings/diagnose/test_diagnosis_faults.py compares them
with tensors."""

from typing import Any

from ...parallel.spec import Spec, spec_of
from ...parallel.spec.facts import Facts
from ..history import History
from ..values import GIB
from .expected import highest


def figures_of(history: History, changes: dict[str, Any] | None = None) -> tuple[Spec, Facts]:
    """Returns the strategy of a run, which needs the fact parameters.total, and the figures that
    its memory is computed from. `changes` are keys whose values differ from the run's
    configuration."""
    changed = changes if changes is not None else {}

    def key(path: str, default: object = None) -> Any:
        if path in changed:
            return changed[path]
        return history.key(path, default)

    # A user's own class may have this key with a value of another type.
    def number(path: str, default: int) -> Any:
        if path in changed:
            return changed[path]
        return history.number(path, default)

    def fact(path: str, default: int = 0) -> int:
        known = history.fact(path)
        return known if known else default

    spec = spec_of(history.key("trainer.strategy"), changed)
    total = fact("parameters.total")
    # The user's optimizer is at the top of the configuration, the library's in the module.
    optimizer = key("optimizer")
    if not optimizer:
        optimizer = key("model.optim.optimizer")
    # Only Muon keeps other state for matrices than for other parameters.
    matrices = 0
    if "muon" in str(optimizer).lower():
        matrices = fact("parameters.matrices")
    precision = key("trainer.precision")
    loss_chunk = number("model.loss_chunk", 0)
    if not history.fact("objective.in_chunks", True):
        loss_chunk = 0
    pipeline = history.fact("pipeline")
    return spec, Facts(
        world_size=fact("machine.world_size", 1),
        parameters=total,
        trainable=fact("parameters.trainable", total),
        in_4_bits=fact("parameters.in_4_bits"),
        matrices=matrices,
        frozen=fact("objective.frozen_stored"),
        embedding=fact("parameters.embedding"),
        layers=max(fact("model.layers") + fact("model.predicted"), 1),
        predicted=fact("model.predicted"),
        width=fact("model.width"),
        vocab_size=fact("model.vocab_size"),
        precision=str(precision) if precision else "32-true",
        checkpointing=key("model.blocks.checkpointing", "none"),
        micro_batch_size=number("data.micro_batch_size", 1),
        seq_len=number("data.seq_len", 0),
        global_batch_size=int(highest(key("data.global_batch_size", 0))),
        loss_chunk=loss_chunk if loss_chunk else None,
        on_host=history.fact("machine.device", "cpu") == "cpu",
        pipeline=pipeline if pipeline else None,
    )


def parts_of(history: History, changes: dict[str, Any] | None = None) -> dict[str, float]:
    """Returns the estimated bytes of each part; in backward, the gradients of one block's
    activations are added."""
    spec, facts = figures_of(history, changes)
    parts = spec.memory(facts)
    parts["activations"] += parts.pop("backward")
    return parts


def as_size(size: float) -> str:
    if size >= GIB / 10:
        return f"{size / GIB:.3g} GiB"
    return f"{size / 2**20:.3g} MiB"
