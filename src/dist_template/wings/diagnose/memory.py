"""The figures of a run on which its memory depends, with its keys or with changed ones; no torch.

`parallel/estimates/` has the formulas; tests/wings/diagnose/test_diagnosis_faults.py compares them
with tensors."""

from typing import Any

from ...parallel.estimates import Estimate, estimate_of
from ...parallel.estimates.facts import Facts
from ..history import History
from ..values import GIB
from .expected import highest


def figures_of(history: History, changes: dict[str, Any] | None = None) -> tuple[Estimate, Facts]:
    """Returns the strategy of a run, which needs the fact parameters.total, and the figures that
    its memory is computed from. `changes` are keys whose values differ from the run's
    configuration."""
    changed = changes or {}

    def key(path: str, default: object = None) -> Any:
        return changed.get(path, history.key(path, default))

    def number(path: str, default: int) -> Any:  # another type in a user's own class
        return changed[path] if path in changed else history.number(path, default)

    def fact(path: str) -> int:
        return history.fact(path) or 0

    total, chosen = fact("parameters.total"), str(key("optimizer") or key("model.optim.optimizer"))
    return estimate_of(history.key("trainer.strategy"), changed), Facts(
        world_size=fact("machine.world_size") or 1,
        parameters=total,
        trainable=fact("parameters.trainable") or total,
        in_4_bits=fact("parameters.in_4_bits"),
        matrices=fact("parameters.matrices") * ("muon" in chosen.lower()),
        embedding=fact("parameters.embedding"),
        layers=max(fact("model.layers") + fact("model.predicted"), 1),
        predicted=fact("model.predicted"),
        width=fact("model.width"),
        vocab_size=fact("model.vocab_size"),
        precision=str(key("trainer.precision") or "32-true"),
        checkpointing=key("model.blocks.checkpointing", "none"),
        micro_batch_size=number("data.micro_batch_size", 1),
        seq_len=number("data.seq_len", 0),
        global_batch_size=int(highest(key("data.global_batch_size", 0))),
        loss_chunk=number("model.loss_chunk", 0) or None,
        on_host=history.fact("machine.device", "cpu") == "cpu",
        pipeline=history.fact("pipeline") or None,
    )


def parts_of(history: History, changes: dict[str, Any] | None = None) -> dict[str, float]:
    """Returns the estimated bytes of each part; in backward, the gradients of one block's
    activations are added."""
    sharding, facts = figures_of(history, changes)
    parts = sharding.memory(facts)
    parts["activations"] += parts.pop("backward")
    return parts


def as_size(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / 2**20:.3g} MiB"
