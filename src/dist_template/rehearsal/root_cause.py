"""Names the first difference between two trainings, in the order of execution, and the code to inspect."""

from __future__ import annotations

from .compare import FORWARD, first_difference, forward_pass, gradient_factor, gradients, replicas, samples
from .gradient_hooks import first_other_factor
from .record import RunRecord

FACTOR = 1e-3  # tolerated relative difference of the factor by which a hook scales the gradients


def trace(expected: RunRecord, got: RunRecord) -> str:
    """Describes the first difference between two trainings that should be equal."""
    if name := first_difference(expected.start, got.start):
        return f"the starting weights differ first in {name}"
    if text := samples(expected, got):
        return f"{text}; the order comes from {got.places.get('order', 'the loader')}"
    if (found := replicas(got)) and found[0] == 0:
        return disagreement(got, found)
    if text := forward_pass(expected, got):
        return text
    if text := first_other_factor(expected.tensors("stages") or [], got.tensors("stages") or [], FACTOR):
        return text
    if text := first_gradient(expected, got):
        return text
    if found:
        return disagreement(got, found)
    if name := first_difference(expected.tensors("buffers") or {}, got.tensors("buffers") or {}, FORWARD):
        return f"buffer {name} differs after the first step: it depends on the rank's own data ({got.owner(name)})"
    if expected.after(1, "rates") != got.after(1, "rates"):
        return f"learning rates differ after the first step: {expected.after(1, 'rates')}, {got.after(1, 'rates')}"
    optimizer = got.places.get("optimizer", "?")
    return f"outputs, gradients and learning rate of the first step agree, the update differs: inspect {optimizer}"


def disagreement(record: RunRecord, found: tuple[int, str, int, int]) -> str:
    """Explains a tensor that differs between ranks that replicate it."""
    step, name, rank, other = found
    is_buffer = name in record.buffers
    when = f"after step {step}" if step else "before the first step"
    what = f"{'buffer ' * is_buffer}{name} on rank {rank} differs from rank {other}'s {when}"
    if is_buffer:
        why = "each rank computes it from its own data: all-reduce it, or compute it from data that all ranks have"
        return f"{what}: {why} ({record.owner(name)})"
    if not step:
        return f"{what}: it differs from what rank 0 built ({record.owner(name)})"
    of_gradient = replicas(record, "gradients")
    if step == 1 and of_gradient:
        return f"{what}: its gradient is not reduced over these ranks ({record.owner(name)})"
    return f"{what} though its gradients agree: something other than the optimizer changes it ({record.owner(name)})"


def first_gradient(expected: RunRecord, got: RunRecord) -> str:
    """Describes the first gradient in backward order that differs; "" if all agree."""
    differing, total = gradients(expected, got), len(expected.tensors("gradients") or {})
    if not differing:
        return ""
    step = got.places.get("training_step", "module.py, training_step")
    if (factor := gradient_factor(expected, got)) is not None and len(differing) == total:
        return (
            f"outputs agree and all gradients are {factor:.4g} times as large: check the loss and its division by"
            f" batch['tokens_per_micro_batch'], the counted tokens of the global batch (training_step, {step})"
        )
    if len(differing) == total:
        return (
            "every module's output agrees and all gradients differ: check the loss and its division by"
            f" batch['tokens_per_micro_batch'], the counted tokens of the global batch (training_step, {step})"
        )
    order = list((next(iter(got.tensors("forward0") or []), {"tensors": {}}))["tensors"])
    places = {name: order.index(owner) if (owner := name.rpartition(".")[0]) in order else -1 for name in differing}
    name = max(differing, key=lambda each: places[each])  # the last module in forward is the first in backward
    how = f"{name} ({differing[name]}; {got.owner(name)})"
    if len(differing) == 1:
        return f"the first gradients differ in 1 of {total} parameters: {how}"
    return f"the first gradients differ in {len(differing)} of {total} parameters; backward first reaches {how}"


def trace_resumed(uninterrupted: RunRecord, resumed: RunRecord) -> str:
    """Describes which state of the uninterrupted training the resumed one lacks."""
    first = min(resumed.loss, default=0)
    if text := samples(uninterrupted, resumed):
        data, order = (resumed.places.get(name, "?") for name in ("datamodule", "order"))
        return f"{text}: the data ({data}; order: {order}) do not continue after the checkpoint's last sample"
    same_ranks, draws = uninterrupted.size == resumed.size, uninterrupted.tensors("draws") or {}
    for rank in range(uninterrupted.size if same_ranks and draws else 0):
        if resumed.random(rank).get(first) != uninterrupted.random(rank).get(first):
            name, what = next(iter(draws.items()))
            where = f"{what} in {name} ({uninterrupted.places.get(name, '?')})"
            return f"rank {rank} resumes step {first} with another random state, used by {where}"
    want, have = uninterrupted.after(first - 1, "tensors"), resumed.after(first - 1, "tensors")
    for name, value in have.items():
        if name in want and want[name] != value and (same_ranks or want[name][0] == value[0] == ""):
            kind = "buffer " if name in resumed.buffers else ""
            return f"{kind}{name} is not restored as it was after step {first - 1} ({resumed.owner(name)})"
    if same_ranks and (text := _lost(uninterrupted, resumed, first - 1, "optimizer")):
        return f"the optimizer ({resumed.places.get('optimizer', '?')}) does not restore its state of {text}"
    if text := _lost(uninterrupted, resumed, first - 1, "python"):
        return f"no checkpoint holds {text}: make it a buffer, or save it in on_save_checkpoint"
    for step in range(first - 1, max(resumed.loss)):
        expected, got = uninterrupted.after(step, "rates"), resumed.after(step, "rates")
        if expected != got and len(expected) == len(got):
            rates = f"{got[0]:.4g} instead of {expected[0]:.4g}"
            return f"the learning rate of step {step + 1} is {rates}: the schedule's state is not restored"
    return (
        "samples, random state, weights, optimizer, Python attributes and learning rate are restored: what is not is"
        " held by none of them"
    )


def lost_at_the_end(uninterrupted: RunRecord, resumed: RunRecord) -> str:
    """Describes a tensor whose final value differs after a resume without an effect on the loss, such as an average."""
    last = max(uninterrupted.loss, default=0)
    want, have = uninterrupted.after(last, "tensors"), resumed.after(last, "tensors")
    if name := next((name for name in want if want[name] != have.get(name)), ""):
        kind = "buffer " if name in resumed.buffers else ""
        why = "it changes after the checkpoint is written, as in on_train_batch_end: change it in optimizer_step"
        if name not in uninterrupted.end:
            why = "it is not persistent"
        return f"{kind}{name} ends with another value after a resume: {why} ({resumed.owner(name)})"
    if text := _lost(uninterrupted, resumed, last, "python", "tensor"):
        return f"no checkpoint holds {text}: make it a buffer, or save it in on_save_checkpoint"
    return ""


def _lost(uninterrupted: RunRecord, resumed: RunRecord, step: int, kind: str, prefix: str = "") -> str:
    """Names the state that changed during training and differs after the resume; "" if there is none."""
    want, have, start = uninterrupted.after(step, kind), resumed.after(step, kind), uninterrupted.after(0, kind)
    lost = [
        name
        for name, value in want.items()
        if value.startswith(prefix) and value != have.get(name) and value != start.get(name)
    ]
    if not lost:
        return ""
    change = f" ({have.get(lost[0])} instead of {want[lost[0]]})" if len(want[lost[0]]) < 12 else ""
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    where = f" of {resumed.owner(lost[0])}" if kind == "python" and resumed.owner(lost[0]) != "?" else ""
    return f"{lost[0]}{change}{where}{others}"
