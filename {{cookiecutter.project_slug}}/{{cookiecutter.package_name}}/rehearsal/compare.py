"""Where two trainings begin to differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor

from .record import RunRecord

FORWARD = GRADIENT = 1e-4  # of a tensor's largest value; rounding in another order makes 1e-6
NOISE = 1e-3  # of the largest gradient: below it, a parameter whose true gradient is zero would be compared with itself


def relative_difference(expected: Mapping[int, float], got: Mapping[int, float]) -> tuple[float, dict[int, float]]:
    """The largest relative difference over the steps of `got`, and that of each step; infinite for a missing step."""
    each = {step: _relative(expected[step], value) if step in expected else float("inf") for step, value in got.items()}
    return max(each.values(), default=float("inf")), each


def _relative(expected: float, got: float) -> float:
    if expected == got:
        return 0.0
    difference = abs(got - expected) / max(abs(expected), 1e-12)
    return difference if difference == difference else float("inf")  # NaN differs from all


def first_difference(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], tolerance: float = 0.0) -> str:
    """The first tensor in `expected` to differ by more than `tolerance` of its largest value; "" if there is none."""
    names = list(_differing(expected, got, tolerance))
    return names[0] if names else ""


def _differing(
    expected: Mapping[str, Tensor], got: Mapping[str, Tensor], tolerance: float, floor: float = 0.0
) -> Iterator[str]:
    for name, tensor in expected.items():
        if name not in got:
            yield f"{name} (missing)"
        elif got[name].shape != tensor.shape:
            yield f"{name} ({list(got[name].shape)} instead of {list(tensor.shape)})"
        else:
            difference = _largest(got[name].double() - tensor.double())
            if not difference <= tolerance * max(_largest(tensor), floor):
                yield f"{name} (max |difference| {difference:.1e})"
    yield from (f"{name} (unexpected)" for name in got if name not in expected)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def trace(expected: RunRecord, got: RunRecord) -> str:
    """In one or two sentences: what of the two trainings differs first, in the order in which a training goes."""
    found = [text for text in (_start(expected, got), samples(expected, got), _replicas(got)) if text]
    found += [text] if (text := _first_step(expected, got)) else []
    return "; ".join(found[:2]) or "nothing in the first step differs: it builds up later"


def _start(expected: RunRecord, got: RunRecord) -> str:
    name = first_difference(expected.start, got.start)
    return f"the starting weights differ first in {name}" if name else ""


def samples(expected: RunRecord, got: RunRecord) -> str:
    """The first step at which the two read other sequences; "" if none."""
    want, have = expected.rows(), got.rows()
    for step in sorted(have):
        missing = Counter(row for row, _ in want.get(step, [])) - Counter(row for row, _ in have[step])
        if missing:
            return f"step {step} lacks {sum(missing.values())} of the {len(want[step])} samples that belong to it"
    return ""


def replicas(record: RunRecord) -> tuple[int, str, int, int] | None:
    """(step, tensor, rank, other rank) where ranks first hold different values of what should be one; None: nowhere."""
    ranks = [{event["step"]: event["tensors"] for event in record.events("step", rank)} for rank in range(record.size)]
    for step in sorted(ranks[0]):
        for name in ranks[0][step]:
            holders: dict[str, tuple[int, str]] = {}  # part -> (rank, hash)
            for rank, steps in enumerate(ranks):
                part, value = steps.get(step, {}).get(name, ("?", ""))
                other, known = holders.setdefault(part, (rank, value))
                if known != value:
                    return step, name, rank, other
    return None


def _replicas(record: RunRecord) -> str:
    found = replicas(record)
    if not found:
        return ""
    step, name, rank, other = found
    when = f"from step {step} on" if step else "before the first step"
    return f"{name} on rank {rank} differs from rank {other}'s {when}"


def _first_step(expected: RunRecord, got: RunRecord) -> str:
    outputs, differing = _forward(expected, got), gradients(expected, got)
    if outputs:
        return f"the first forward pass differs first in the output of {outputs}"
    if not differing:
        return ""
    total = len(expected.tensors("gradients"))
    if len(differing) < total:
        return f"the first gradients differ in {len(differing)} of {total} parameters, first in {differing[0]}"
    return (
        "every module's output agrees and all gradients differ: the loss does, or how it is divided by"
        " batch['tokens_per_micro_batch'], the tokens that count in the global batch (module.py, training_step)"
    )


def _forward(expected: RunRecord, got: RunRecord) -> str:
    """The module whose output is the first to differ; those whose output lies sharded on the ranks are passed over."""
    for name, want in (expected.tensors("forward") or {}).items():
        have = (got.tensors("forward") or {}).get(name)
        if have is None or have.shape[1:] != want.shape[1:] or not want.is_floating_point():
            continue
        rows = min(len(want), len(have)) if want.ndim else None  # one may have had more sequences in its micro-batch
        if differing := first_difference({name: want[:rows]}, {name: have[:rows]}, FORWARD):
            return differing
    return ""


def gradients(expected: RunRecord, got: RunRecord) -> list[str]:
    """The parameters whose gradients of the first step differ."""
    want, have = expected.tensors("gradients") or {}, got.tensors("gradients") or {}
    floor = NOISE * max(map(_largest, want.values()), default=0.0)
    return list(_differing(want, {name: have[name] for name in want if name in have}, GRADIENT, floor))


def trace_resumed(whole: RunRecord, resumed: RunRecord) -> str:
    """What of a resumed training differs first from one that never stopped."""
    first = min(resumed.loss, default=0)
    if text := samples(whole, resumed):
        return text
    for rank in range(min(whole.size, resumed.size)):
        expected, got = whole.random(rank), resumed.random(rank)
        if got.get(first) != expected.get(first):
            return f"rank {rank} resumes step {first} with another random state, so dropout is drawn anew"
    weights = {event["step"]: event["tensors"] for event in whole.events("step")}.get(first - 1, {})
    restored = resumed.events("step")[0]["tensors"] if resumed.events("step") else {}
    for name, value in restored.items():
        if name in weights and weights[name] != value:
            return f"{name} is not restored as it was after step {first - 1}"
    return "samples, random state and weights are restored: the optimizer's or the schedule's state is not"
