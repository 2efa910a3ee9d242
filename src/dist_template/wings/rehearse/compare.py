"""Compares two trainings: losses, tensors, gradients, samples, replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from .forward_hooks import EXPERTS, describe
from .record import RunRecord

FORWARD = GRADIENT = 1e-4  # relative to a tensor's largest value; another order of sums gives 1e-6
NOISE = 1e-3  # relative to the largest gradient: smaller ones are rounding errors of a true zero
Curve = Mapping[int, float]  # {step: value}
Tensors = Mapping[str, Tensor]


def relative_difference(expected: Curve, got: Curve) -> tuple[float, dict[int, float]]:
    """Returns the largest relative difference, and that of each step of `got`.

    It is infinite for a step that `expected` lacks.
    """
    each: dict[int, float] = {}
    for step, value in got.items():
        each[step] = _relative(expected.get(step, float("nan")), value)
    return max(each.values(), default=float("inf")), each


def _relative(expected: float, got: float) -> float:
    if expected == got:
        return 0.0
    difference = abs(got - expected) / max(abs(expected), 1e-12)
    return difference if difference == difference else float("inf")  # NaN differs from all


def first_difference(expected: Tensors, got: Tensors, tolerance: float = 0.0) -> str:
    """Returns the first tensor with a relative difference above `tolerance`, or ""."""
    return next((f"{name} ({how})" for name, how in _differing(expected, got, tolerance)), "")


def _differing(
    expected: Tensors, got: Tensors, tolerance: float, floor: float = 0.0
) -> Iterator[tuple[str, str]]:
    """Yields (name, how it differs) of each tensor that differs."""
    for name, tensor in expected.items():
        if name not in got:
            yield name, "missing"
        elif got[name].shape != tensor.shape:
            yield name, f"{list(got[name].shape)} instead of {list(tensor.shape)}"
        else:
            difference = _largest(got[name].double() - tensor.double())
            if not difference <= tolerance * max(_largest(tensor), floor):
                yield name, f"max |difference| {difference:.1e}"
    yield from ((name, "unexpected") for name in got if name not in expected)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def samples(expected: RunRecord, got: RunRecord) -> str:
    """Describes the first step at which `got` lacks samples of `expected`; "" if there is none."""
    want, have = expected.rows(), got.rows()
    known = {row for rows in want.values() for row, _ in rows}
    for step in sorted(have):
        belong = Counter(row for row, _ in want.get(step, []))
        missing = belong - Counter(row for row, _ in have[step])
        if missing:
            num, total = sum(missing.values()), sum(belong.values())
            text = f"step {step} lacks {num} of the {total} samples that belong to it"
            if not known.issuperset(row for row, _ in have[step]):
                place = got.places.get("transform", "?")
                text += f", and has tokens of no known sample (transform, {place})"
            return text
    return ""


def labels(expected: RunRecord, got: RunRecord) -> str:
    """Describes a sample of the first step whose labels are not those of `expected`, or ""."""
    known: dict[str, str] = {}
    for run in (expected, got):
        for rank in range(run.size):
            for each in run.forward_passes(rank):
                for row, label in zip(each["rows"], each["labels"], strict=False):
                    if known.setdefault(row, label) != label and run is got:
                        return f"a sample of rank {rank} has other labels in step 1"
    return ""


def replicas(record: RunRecord, kind: str = "step") -> tuple[int, str, int, int] | None:
    """Returns (step, tensor, rank, other rank) of the first tensor whose replicas differ, or None.

    `kind` is step (parameters and buffers after each step) or gradients (of the first step).
    """
    ranks: list[dict[int, Any]] = []
    for rank in range(record.size):
        events = record.events(kind, rank)
        ranks.append({event.get("step", 1): event["tensors"] for event in events})
    for step in sorted(ranks[0]):
        for name in dict.fromkeys(name for steps in ranks for name in steps.get(step, {})):
            holders: dict[str, tuple[int, str]] = {}  # part -> (rank, hash)
            for rank, steps in enumerate(ranks):
                part, value = steps.get(step, {}).get(name, ("?", ""))
                other, known = holders.setdefault(part, (rank, value))
                if known != value:
                    return step, name, rank, other
    return None


def forward_pass(expected: RunRecord, got: RunRecord) -> str:
    """Describes where forward passes of the first step first differ, on any rank; "" if nowhere.

    Micro-batches are matched by their sequences.
    """
    wanted = [each for rank in range(expected.size) for each in expected.forward_passes(rank)]
    for rank in range(got.size):
        for have in got.forward_passes(rank):
            for want in wanted:
                if key := _first_different_output(want, have):
                    where = describe(key, got.places)
                    return f"the forward pass of rank {rank} differs first in {where}"
    return ""


def _first_different_output(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """Returns the first tensor of a forward pass that differs; "" if none does, or the rows differ.

    A rank's tokens of each sequence are compared with the part of it that is nearest. Tensors that
    are sharded otherwise, or not ordered by row, have other shapes and are skipped.
    """
    rows, other_rows = len(expected["rows"]), len(got["rows"])
    common = min(rows, other_rows)
    if expected["rows"][:common] != got["rows"][:common]:
        return ""
    for key, want in expected["tensors"].items():
        have = got["tensors"].get(key)
        if have is None or EXPERTS in key or not want.ndim or not have.ndim:
            continue
        per_row = len(want) // rows
        size = have.shape[1] if have.ndim == want.ndim > 2 else 0
        parts = [want] if not size or want.shape[1] % size else want.split(size, 1)
        shape = (rows * per_row, *have.shape[1:])
        if parts[0].shape != shape or len(have) != other_rows * per_row:
            continue
        num = common * per_row
        difference = min(_largest(part[:num].double() - have[:num].double()) for part in parts)
        if not difference <= FORWARD * _largest(want):
            return key
    return ""


def gradients(expected: RunRecord, got: RunRecord) -> dict[str, str]:
    """Returns {parameter: how it differs} of the gradients of the first step."""
    want, have = expected.gradients, got.gradients
    floor = NOISE * max(map(_largest, want.values()), default=0.0)
    common = {name: have[name] for name in want if name in have}
    return dict(_differing(want, common, GRADIENT, floor))


def gradient_factor(expected: RunRecord, got: RunRecord) -> float | None:
    """Returns the common factor between the gradients of the first step; None if there is none."""
    want, have = expected.gradients, got.gradients
    norms = {name: tensor.double().norm().item() for name, tensor in want.items() if name in have}
    factors: list[float] = []
    for name, norm in norms.items():
        if norm > NOISE * max(norms.values()):
            factors.append(have[name].double().norm().item() / norm)
    is_common = factors and max(factors) - min(factors) < 1e-3 * max(factors)
    return factors[0] if is_common else None
