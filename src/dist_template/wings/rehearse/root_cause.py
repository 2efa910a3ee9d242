"""Names the first difference between two trainings and the code to inspect."""

from __future__ import annotations

from typing import Any

from .compare import (
    FORWARD,
    first_difference,
    forward_pass,
    gradient_factor,
    gradients,
    labels,
    replicas,
    samples,
)
from .gradient_hooks import first_other_factor
from .record import RunRecord

FACTOR = 1e-3  # tolerated relative difference of the factor by which a hook scales the gradients
LOSS = "check the loss and its division"
NOT_SAVED = "make it a buffer, or save it in on_save_checkpoint"


def trace(expected: RunRecord, got: RunRecord) -> str:
    """Describes the first difference between two trainings that should be equal."""
    if name := first_difference(expected.start, got.start):
        return f"the starting weights differ first in {name}"
    if text := samples(expected, got):
        return f"{text}; the order comes from {got.places.get('order', 'the loader')}"
    if text := labels(expected, got):
        return f"{text}: look at what makes them (transform, {got.places.get('transform', '?')})"
    if (found := replicas(got)) and found[0] == 0:
        return disagreement(got, found)
    for run in (expected, got):
        changed = (each["changed"] for rank in range(run.size) for each in run.forward_passes(rank))
        if name := next(filter(None, changed), ""):
            why = "between the micro-batches of a step: look at hooks that run for each of them"
            return f"{name} changes {why} (on_train_batch_start, on_train_batch_end)"
    if text := forward_pass(expected, got):
        return text
    factors, other_factors = expected.tensors("factors") or {}, got.tensors("factors") or {}
    # Clipping depends on the norm, so that it differs as a consequence where gradients differ.
    unclipped = {hook: factor for hook, factor in other_factors.items() if "clipping" not in hook}
    if text := first_other_factor(factors, unclipped, FACTOR):
        return text
    buffers, other_buffers = expected.tensors("buffers") or {}, got.tensors("buffers") or {}
    changed = first_difference(buffers, other_buffers, FORWARD)
    if text := first_gradient(expected, got):
        if not (changed and LOSS in text):
            return text
    elif text := first_other_factor(factors, other_factors, FACTOR):
        return text
    if found:
        return disagreement(got, found)
    if changed:
        why = f"it depends on the rank's own data ({got.owner(changed)})"
        return f"buffer {changed} differs after the first step: {why}"
    rates = expected.after(1, "rates", 0)
    for rank in range(got.size):
        if (other_rates := got.after(1, "rates", rank)) != rates:
            what = f"{rates}, {other_rates} on rank {rank}"
            return f"learning rates differ after the first step: {what}"
    return (
        "outputs, gradients and learning rate of the first step agree, the update differs: inspect"
        f" {got.places.get('optimizer', '?')}"
    )


def disagreement(record: RunRecord, found: tuple[int, str, int, int]) -> str:
    """Explains a tensor that differs between ranks that replicate it, as `replicas` returns it."""
    step, name, rank, other = found
    owner = record.owner(name)
    when = f"after step {step}" if step else "before the first step"
    what = f"{name} on rank {rank} differs from rank {other}'s {when}"
    if name in record.buffers:
        return (
            f"buffer {what}: each rank computes it from its own data: all-reduce it, or compute it"
            f" from data that all ranks have ({owner})"
        )
    if not step:
        return f"{what}: it differs from what rank 0 built ({owner})"
    if step == 1 and replicas(record, "gradients"):
        return f"{what}: its gradient is not reduced over these ranks ({owner})"
    why = "something other than the optimizer changes it"
    return f"{what} though its gradients agree: {why} ({owner})"


def first_gradient(expected: RunRecord, got: RunRecord) -> str:
    """Describes the first gradient in backward order that differs; "" if all agree."""
    differing, total = gradients(expected, got), len(expected.gradients)
    if not differing:
        return ""
    if len(differing) == total:
        factor = gradient_factor(expected, got)
        how = "differ" if factor is None else f"are {factor:.4g} times as large"
        return (
            f"outputs agree and all gradients {how}: {LOSS} by"
            " batch['tokens_per_micro_batch'], the counted tokens of the global batch"
            f" (training_step, {got.places.get('training_step', 'module.py')})"
        )
    passes = expected.forward_passes(0)
    order = {name: number for number, name in enumerate(passes[0]["tensors"] if passes else ())}
    # The module that comes last in forward is the first in backward.
    name = max(differing, key=lambda each: order.get(each.rpartition(".")[0], -1))
    how = f"{name} ({differing[name]}; {got.owner(name)})"
    if len(differing) == 1:
        return f"the first gradients differ in 1 of {total} parameters: {how}"
    several = f"{len(differing)} of {total} parameters"
    return f"the first gradients differ in {several}; backward first reaches {how}"


def trace_resumed(uninterrupted: RunRecord, resumed: RunRecord) -> str:
    """Describes which state of the uninterrupted training the resumed one lacks."""
    first, places = min(resumed.loss, default=0), resumed.places
    if text := samples(uninterrupted, resumed):
        data, order = places.get("datamodule", "?"), places.get("order", "?")
        lost = "do not continue after the checkpoint's last sample"
        return f"{text}: the data ({data}; order: {order}) {lost}"
    same_ranks = uninterrupted.size == resumed.size
    if same_ranks and (text := _other_random_state(uninterrupted, resumed, first)):
        return text
    for want, have in _states(uninterrupted, resumed, first - 1, "tensors"):
        for name, value in have.items():
            is_comparable = same_ranks or want.get(name, "?")[0] == value[0] == ""
            if name in want and want[name] != value and is_comparable:
                text = f"is not restored as it was after step {first - 1}"
                return f"{_kind(resumed, name)}{name} {text} ({resumed.owner(name)})"
    if same_ranks and (text := _lost(uninterrupted, resumed, first - 1, "optimizer")):
        optimizer = places.get("optimizer", "?")
        return f"the optimizer ({optimizer}) does not restore its state of {text}"
    if text := _lost(uninterrupted, resumed, first - 1, "python"):
        return f"no checkpoint holds {text}: {NOT_SAVED}"
    for step in range(first - 1, max(resumed.loss)):
        expected, got = (run.after(step, "rates", 0) for run in (uninterrupted, resumed))
        if expected != got and len(expected) == len(got):
            rates = f"{got[0]:.4g} instead of {expected[0]:.4g}"
            why = "the schedule's state is not restored"
            return f"the learning rate of step {step + 1} is {rates}: {why}"
    return (
        "samples, random state, weights, optimizer, Python attributes and learning rate are"
        " restored: the state that is not restored is in none of them"
    )


def _other_random_state(uninterrupted: RunRecord, resumed: RunRecord, first: int) -> str:
    for name, what in uninterrupted.draws.items():
        for rank in range(uninterrupted.size):
            if resumed.random(rank).get(first) != uninterrupted.random(rank).get(first):
                where = f"{what} in {name} ({uninterrupted.places.get(name, '?')})"
                state = f"rank {rank} resumes step {first} with another random state"
                return f"{state}, used by {where}"
    return ""


def lost_at_the_end(uninterrupted: RunRecord, resumed: RunRecord) -> str:
    """Describes a tensor, such as an average, that differs after a resume with equal losses."""
    last = max(uninterrupted.loss, default=0)
    states = _states(uninterrupted, resumed, last, "tensors")
    if name := next((n for want, have in states for n in want if want[n] != have.get(n)), ""):
        why = "it changes after the checkpoint is written, as in on_train_batch_end:"
        why += " change it in optimizer_step"
        if name not in uninterrupted.end:
            why = "it is not persistent"
        what = f"{_kind(resumed, name)}{name} ends with another value after a resume"
        return f"{what}: {why} ({resumed.owner(name)})"
    if text := _lost(uninterrupted, resumed, last, "python", "tensor"):
        return f"no checkpoint holds {text}: {NOT_SAVED}"
    return ""


def _states(one: RunRecord, other: RunRecord, step: int, kind: str) -> list[tuple[Any, Any]]:
    """Returns what each rank recorded in two trainings; of different sizes, that of all ranks."""
    ranks = range(one.size) if one.size == other.size else [None]
    return [(one.after(step, kind, rank), other.after(step, kind, rank)) for rank in ranks]


def _kind(record: RunRecord, name: str) -> str:
    return "buffer " if name in record.buffers else ""


def _lost(
    uninterrupted: RunRecord, resumed: RunRecord, step: int, kind: str, prefix: str = ""
) -> str:
    """Names state that changed during training and differs after the resume, or returns ""."""
    lost: dict[str, tuple[str, str | None]] = {}  # name: value, value after the resume
    starts = [start for start, _ in _states(uninterrupted, resumed, 0, kind)]
    states = _states(uninterrupted, resumed, step, kind)
    for (want, have), start in zip(states, starts, strict=True):
        for name, value in want.items():
            if value.startswith(prefix) and value not in (have.get(name), start.get(name)):
                lost.setdefault(name, (value, have.get(name)))
    if not lost:
        return ""
    name, (value, other) = next(iter(lost.items()))
    text = name
    if len(value) < 12:  # a number, not a hash
        text += f" ({other} instead of {value})"
    if kind == "python" and resumed.owner(name) != "?":
        text += f" of {resumed.owner(name)}"
    return text + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
