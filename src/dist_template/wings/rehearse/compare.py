"""Compares two trainings, and names the first difference and the code to inspect.

`trace` compares two trainings that start equal, in the order of execution: starting weights,
samples, forward passes, gradients. `trace_resumed` compares an uninterrupted training with a
resumed one: samples, random state, weights and buffers, Python attributes, learning rates. Below
them is what they compare."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from .forward_hooks import EXPERTS, with_location
from .record import ForwardPass, RunRecord

FORWARD = GRADIENT = 1e-4  # relative to a tensor's largest value; another order of sums gives 1e-6
NOISE = 1e-3  # relative to the largest gradient: smaller ones are rounding errors of a true zero
OF_A_RANK = (".running_mean", ".running_var")  # of the batches that a rank has seen
NOT_SAVED = "make it a buffer, or save it in on_save_checkpoint"
K = TypeVar("K")
Tensors = Mapping[str, Tensor]


def trace(expected: RunRecord, got: RunRecord) -> str:
    """Describes the first difference between two trainings that should be equal."""
    first_weight = first_difference(expected.start, got.start)
    if first_weight:
        return f"the starting weights differ first in {first_weight}"
    difference = samples(expected, got)
    if difference:
        return difference
    differing = replicas(got)
    if differing and differing[0] == 0:  # before the first step
        return disagreement(got, differing)
    difference = forward_pass(expected, got) or _first_gradient(expected, got)
    if difference:
        return difference
    if differing:
        return disagreement(got, differing)
    update = f"the learning rate, {got.places.get('optimizer', '?')}{_hooks(got)}"
    return f"outputs and gradients of the first step agree, the update differs: inspect {update}"


def _hooks(record: RunRecord) -> str:
    """Returns words for the user's hooks that change gradients; "" without such hooks."""
    hooks = record.places.get("hooks")
    if not hooks:
        return ""
    return f" and hooks that change gradients ({hooks})"


def disagreement(record: RunRecord, differing: tuple[int, str, int, int]) -> str:
    """Explains a tensor that differs between ranks that replicate it, as `replicas` returns it."""
    step, name, rank, other = differing
    when = f"after step {step}" if step else "before the first step"
    tensor = f"{name} ({record.owner(name)}) on rank {rank} differs from rank {other}'s {when}"
    if not step:
        return f"{tensor}: it differs from what rank 0 built"
    if name in record.tensors("gradients"):
        return (
            f"{tensor}: its gradient is not reduced over these ranks, or something other than the"
            " optimizer changes it"
        )
    return (
        f"{tensor}: each rank computes it from its own data: all-reduce it, or use data that all"
        " ranks have"
    )


def _first_gradient(expected: RunRecord, got: RunRecord) -> str:
    """Describes the first gradient in backward order that differs; "" if all agree."""
    differing, want = gradients(expected, got), expected.tensors("gradients")
    if not differing:
        return ""
    if len(differing) == len(want):
        have = got.tensors("gradients")
        # All by the same factor? It is read off the gradient with the largest value.
        largest = max(want, key=lambda name: _largest(want[name]))
        factor = 0.0
        if largest in have:
            factor = have[largest].norm().item() / want[largest].norm().item()
        how = "differ"
        if not gradients(expected, got, factor):
            how = f"are {factor:.4g} times as large"
        return (
            f"outputs agree and all gradients {how}: check the loss and its division by"
            " batch['tokens_per_micro_batch'], the counted tokens of the global batch"
            f" (training_step, {got.places.get('training_step', 'module.py')}){_hooks(got)}"
        )
    _, first_pass = expected.forward_passes()[0]
    order = {name: number for number, name in enumerate(first_pass["tensors"])}

    def order_of_module(parameter: str) -> int:
        return order.get(parameter.rpartition(".")[0], -1)

    # The module that comes last in forward is the first in backward.
    name = max(differing, key=order_of_module)
    return (
        f"the first gradients differ in {len(differing)} of {len(want)} parameters; backward first"
        f" reaches {name} ({differing[name]}; {got.owner(name)})"
    )


# ---- after a resume ----------------------------------------------------------------------------


def trace_resumed(uninterrupted: RunRecord, resumed: RunRecord) -> str:
    """Describes which state of the uninterrupted training the resumed one lacks."""
    first = min(resumed.loss, default=0)
    before = first - 1  # the step of the checkpoint
    difference = samples(uninterrupted, resumed)
    if difference:
        return f"{difference}: the data do not continue after the checkpoint's last sample"
    if uninterrupted.draws:
        for rank in range(resumed.size):
            if resumed.random(rank).get(first) != uninterrupted.random(rank).get(first):
                return f"rank {rank} resumes step {first} with another random state, as of dropout"
    lost = _lost(uninterrupted, resumed, before, "tensors")
    if lost:
        return f"{lost} is not restored as it was after step {before}"
    lost = _lost(uninterrupted, resumed, before, "python")
    if lost:
        return f"no checkpoint holds {lost}: {NOT_SAVED}"
    for step in range(before, max(resumed.loss)):
        expected, got = uninterrupted.after(step, "rates", 0), resumed.after(step, "rates", 0)
        if expected != got and len(expected) == len(got):
            rates = f"{got[0]:.4g} instead of {expected[0]:.4g}"
            return (
                f"the learning rate of step {step + 1} is {rates}: the schedule's state is not"
                " restored"
            )
    optimizer = resumed.places.get("optimizer", "?")
    return (
        "samples, random state, weights, Python attributes and learning rate are restored: inspect"
        f" the optimizer's state ({optimizer})"
    )


def lost_at_the_end(uninterrupted: RunRecord, resumed: RunRecord) -> str:
    """Describes a tensor, such as an average, that differs after a resume with equal losses."""
    last = max(uninterrupted.loss, default=0)
    lost = _lost(uninterrupted, resumed, last, "tensors")
    if lost:
        return (
            f"{lost} ends with another value after a resume: it is not persistent, or changes after"
            " the checkpoint is written (in on_train_batch_end)"
        )
    lost = _lost(uninterrupted, resumed, last, "python", "tensor")
    if lost:
        return f"no checkpoint holds {lost}: {NOT_SAVED}"
    return ""


def _lost(
    uninterrupted: RunRecord, resumed: RunRecord, step: int, kind: str, prefix: str = ""
) -> str:
    """Names the first state that changed during training and differs after the resume, or returns
    "". `prefix`: of the values that are compared."""
    for rank in range(resumed.size):
        start = uninterrupted.after(0, kind, rank)
        want, have = uninterrupted.after(step, kind, rank), resumed.after(step, kind, rank)
        for name, value in want.items():
            if rank and name.endswith(OF_A_RANK):  # a checkpoint has rank 0's
                continue
            if prefix and not value.startswith(prefix):
                continue
            other = have.get(name, "nothing")
            if value == other or value == start.get(name):
                continue
            if kind == "python":
                return f"{name} ({other} instead of {value}; {resumed.owner(name)})"
            return f"{name} ({resumed.owner(name)})"  # values are hashes
    return ""


# ---- what is compared ---------------------------------------------------------------------------


def relative_difference(
    expected: Mapping[K, float], got: Mapping[K, float]
) -> tuple[float, dict[K, float]]:
    """Returns (largest relative difference, relative difference of each step or metric of `got`).
    It is infinite for one that `expected` lacks, and for NaN."""
    differences: dict[K, float] = {}
    for key, value in got.items():
        want = expected.get(key, float("nan"))
        if value == want:  # two infinities too, whose difference would be NaN
            difference = 0.0
        else:
            difference = abs(value - want) / max(abs(want), 1e-12)
        if math.isnan(difference):
            difference = float("inf")
        differences[key] = difference
    return max(differences.values(), default=float("inf")), differences


def first_difference(expected: Tensors, got: Tensors, tolerance: float = 0.0) -> str:
    """Returns the first tensor with a relative difference above `tolerance`, or ""."""
    for name, how in differences(expected, got, tolerance).items():
        return f"{name} ({how})"
    return ""


def differences(
    expected: Tensors, got: Tensors, tolerance: float, floor: float = 0.0
) -> dict[str, str]:
    """Returns {name: how it differs}; `tolerance` is relative to a tensor's largest value, or to
    `floor` if that is larger."""
    differing: dict[str, str] = {}
    for name, tensor in expected.items():
        if name not in got:
            differing[name] = "missing"
        elif got[name].shape != tensor.shape:
            differing[name] = f"{list(got[name].shape)} instead of {list(tensor.shape)}"
        else:
            difference = _largest(got[name].double() - tensor.double())
            if not difference <= tolerance * max(_largest(tensor), floor):  # NaN differs too
                differing[name] = f"max |difference| {difference:.1e}"
    return differing


def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return tensor.abs().max().item()


def gradients(expected: RunRecord, got: RunRecord, factor: float = 1.0) -> dict[str, str]:
    """Returns {parameter: how it differs} of the gradients of the first step, `expected`'s times
    `factor`."""
    want, have = expected.tensors("gradients"), got.tensors("gradients")
    want = {name: tensor * factor for name, tensor in want.items()}
    floor = NOISE * max(map(_largest, want.values()), default=0.0)
    return differences(want, have, GRADIENT, floor)


def samples(expected: RunRecord, got: RunRecord) -> str:
    """Describes the first step at which `got` lacks samples of `expected`, or ""."""
    want, have = expected.rows(), got.rows()
    for step in sorted(have):
        belonging = Counter(want.get(step, []))
        num_missing = (belonging - Counter(have[step])).total()
        if not num_missing:
            continue
        text = f"step {step} lacks {num_missing} of the {belonging.total()} samples that belong to"
        order, transform = got.places.get("order", "?"), got.places.get("transform", "?")
        if not transform:  # the data are no text
            return f"{text} it, or their values differ, as of an augmentation (order: {order})"
        return f"{text} it, or their tokens differ (order: {order}; transform, {transform})"
    return ""


def replicas(record: RunRecord) -> tuple[int, str, int, int] | None:
    """Returns (step, tensor, rank, other rank) of the first parameter or buffer whose replicas
    differ, or None."""
    steps: dict[int, dict[str, dict[int, tuple[str, str]]]] = {}  # {step: {tensor: {rank: …}}}
    for rank in range(record.size):
        for event in record.events("step", rank):
            tensors = steps.setdefault(event["step"], {})
            for name, shard_and_hash in event["tensors"].items():
                tensors.setdefault(name, {})[rank] = shard_and_hash
    for step in sorted(steps):
        for name, hashes in steps[step].items():
            first: dict[str, tuple[int, str]] = {}  # shard: the first rank that has it, hash
            for rank, (shard, value) in hashes.items():
                other, known = first.setdefault(shard, (rank, value))
                if known != value:
                    return step, name, rank, other
    return None


def forward_pass(expected: RunRecord, got: RunRecord) -> str:
    """Describes where forward passes of the first step first differ, on any rank; "" if nowhere.
    Micro-batches are matched by their sequences."""
    expected_passes = expected.forward_passes()
    for rank, have in got.forward_passes():
        for _, want in expected_passes:
            key = _first_different_output(want, have)
            if key:
                where = with_location(key, got.places)
                return f"the forward pass of rank {rank} differs first in {where}"
    return ""


def _first_different_output(expected: ForwardPass, got: ForwardPass) -> str:
    """Returns the first tensor of a forward pass that differs; "" if none does, or the rows differ.
    A rank's tokens of each sequence are compared with the part of it that is nearest. Tensors that
    are sharded otherwise, or not ordered by row, have other shapes and are skipped."""
    rows, other_rows = len(expected["rows"]), len(got["rows"])
    common = min(rows, other_rows)
    if expected["rows"][:common] != got["rows"][:common]:
        return ""
    for key, want in expected["tensors"].items():
        have = got["tensors"].get(key)
        if have is None or EXPERTS in key or not want.ndim or not have.ndim:
            continue
        per_row = len(want) // rows  # 1, or the tokens of a row if the tensor is flat
        parts = [want]
        if have.ndim == want.ndim > 2 and have.shape[1] and want.shape[1] % have.shape[1] == 0:
            parts = list(want.split(have.shape[1], 1))  # of each sequence the tokens of a rank
        shape = (rows * per_row, *have.shape[1:])
        if parts[0].shape != shape or len(have) != other_rows * per_row:
            continue
        compared = slice(common * per_row)  # the rows that both have
        distances = [_largest(part[compared].double() - have[compared].double()) for part in parts]
        if not min(distances) <= FORWARD * _largest(want):  # NaN differs too
            return key
    return ""
