"""Compares two trainings: losses, tensors, gradients, samples, replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor

from .forward_hooks import describe, first_different
from .record import RunRecord

FORWARD = GRADIENT = 1e-4  # relative to a tensor's largest value; another order of summation gives 1e-6
NOISE = 1e-3  # relative to the largest gradient: smaller gradients are rounding errors of a true zero


def relative_difference(expected: Mapping[int, float], got: Mapping[int, float]) -> tuple[float, dict[int, float]]:
    """Returns the largest relative difference, and that of each step of `got`; infinite for a missing step."""
    each = {step: _relative(expected[step], value) if step in expected else float("inf") for step, value in got.items()}
    return max(each.values(), default=float("inf")), each


def _relative(expected: float, got: float) -> float:
    if expected == got:
        return 0.0
    difference = abs(got - expected) / max(abs(expected), 1e-12)
    return difference if difference == difference else float("inf")  # NaN differs from all


def first_difference(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], tolerance: float = 0.0) -> str:
    """Returns the first tensor that differs by more than `tolerance` times its largest value; "" if none does."""
    return next((f"{name} ({how})" for name, how in _differing(expected, got, tolerance)), "")


def _differing(
    expected: Mapping[str, Tensor], got: Mapping[str, Tensor], tolerance: float, floor: float = 0.0
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
    for step in sorted(have):
        missing = Counter(row for row, _ in want.get(step, [])) - Counter(row for row, _ in have[step])
        if missing:
            return f"step {step} lacks {sum(missing.values())} of the {len(want[step])} samples that belong to it"
    return ""


def replicas(record: RunRecord, kind: str = "step") -> tuple[int, str, int, int] | None:
    """Returns (step, tensor, rank, other rank) of the first tensor whose replicas differ; None if none does.

    `kind` is step (parameters and buffers after each step) or gradients (of the first step).
    """
    ranks = [{e.get("step", 1): e["tensors"] for e in record.events(kind, rank)} for rank in range(record.size)]
    for step in sorted(ranks[0]):
        for name in ranks[0][step]:
            holders: dict[str, tuple[int, str]] = {}  # part -> (rank, hash)
            for rank, steps in enumerate(ranks):
                part, value = steps.get(step, {}).get(name, ("?", ""))
                other, known = holders.setdefault(part, (rank, value))
                if known != value:
                    return step, name, rank, other
    return None


def forward_pass(expected: RunRecord, got: RunRecord) -> str:
    """Describes where forward passes of the first step first differ, on any rank, and in which code; "" if nowhere.

    Micro-batches are matched by their sequences.
    """
    wanted = [each for rank in range(expected.size) for each in expected.tensors(f"forward{rank}") or []]
    for rank in range(got.size):
        for have in got.tensors(f"forward{rank}") or []:
            for want in wanted:
                num = min(len(want["rows"]), len(have["rows"]))
                rows = len(want["rows"]), len(have["rows"])
                if want["rows"][:num] == have["rows"][:num] and (
                    key := first_different(want["tensors"], have["tensors"], rows, FORWARD)
                ):
                    return f"the forward pass of rank {rank} differs first in {describe(key, got.places)}"
    return ""


def gradients(expected: RunRecord, got: RunRecord) -> dict[str, str]:
    """Returns {parameter: how it differs} of the gradients of the first step."""
    want, have = expected.tensors("gradients") or {}, got.tensors("gradients") or {}
    floor = NOISE * max(map(_largest, want.values()), default=0.0)
    return dict(_differing(want, {name: have[name] for name in want if name in have}, GRADIENT, floor))


def gradient_factor(expected: RunRecord, got: RunRecord) -> float | None:
    """Returns the factor between the gradients of the first step; None unless all have the same factor."""
    want, have = expected.tensors("gradients") or {}, got.tensors("gradients") or {}
    norms = [(want[n].double().norm().item(), have[n].double().norm().item()) for n in want if n in have]
    factors = [b / a for a, b in norms if a > NOISE * max(first for first, _ in norms)]
    return factors[0] if factors and max(factors) - min(factors) < 1e-3 * max(factors) else None
