"""What a pipeline's schedule costs: its bubble, the activations that ranks keep, even stages. No torch.

    p    ranks of a pipeline          v    stages of each rank          m    micro-batches of a step

The schedules are torch's. Formulas are for its orders of passes; tests compare them with these.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Literal, NamedTuple, TypedDict

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
Layers = Literal["cost", "even"] | list[int]


class StageFacts(TypedDict):
    """What facts.json has of a pipeline."""

    schedule: str
    stages: list[list[int]]  # numbers of each rank's stages
    blocks: list[int]  # of each stage
    parameters: list[int]  # of each stage
    bubble: float  # idle time over compute time of a step with one micro-batch


V_SHAPED = {"ZBVZeroBubble", "DualPipeV"}
ONE_STAGE = {"GPipe", "1F1B"}
SPLIT_BACKWARD = {"InterleavedZeroBubble", *V_SHAPED}


def stages_per_rank(schedule: str, interleaved: int) -> int:
    """Returns v; in interleaved schedules it is configured."""
    if schedule in ONE_STAGE:
        return 1
    return 2 if schedule in V_SHAPED else interleaved


def stages_of_rank(schedule: str, rank: int, size: int, per_rank: int) -> list[int]:
    """Returns the numbers of a rank's stages, in order."""
    if schedule in V_SHAPED:
        return [rank, 2 * size - 1 - rank]
    return list(range(rank, size * per_rank, size))


def bubble(schedule: str, stages_of_pipeline: int, stages_per_rank: int, micro_batches: int) -> float:
    """Returns a rank's idle time as a fraction of its compute time.

    A rank waits for p - 1 passes of one of its stages before it starts or after it ends. In GPipe
    and the 1F1B schedules (Narayanan et al., arXiv:2104.04473) they are forward and backward
    passes, 3 units of time each: (p - 1) / (v m). The others compute the gradients of weights
    meanwhile (Qi et al., arXiv:2401.10241) and wait for 1 unit each: (p - 1) / (3 v m).

    Exact for torch's orders of passes, if a stage's forward pass, its inputs' gradients and its weights' gradients each
    take the same time, messages take none, and m is p or more (ZBVZeroBubble: 3 p / 2).
    """
    ranks = stages_of_pipeline // stages_per_rank
    units = 3 if schedule in SPLIT_BACKWARD else 1
    return (ranks - 1) / (units * stages_per_rank * micro_batches)


class Stages(NamedTuple):
    """A pipeline's stages as memory and time need them; the defaults are a model of one stage."""

    largest: float = 1.0  # share of the parameters on the rank that has most
    mean: float = 1.0  # share of the parameters on a rank, with the copies of tied ones
    blocks: int = 0  # on the rank that has most
    kept: float = 1.0  # micro-batches whose activations the rank keeps that keeps most
    kept_at_end: float = 1.0  # the same of the last stage's rank
    crossings: int = 0  # pairs of stages between which messages are sent


def stages_of(facts: StageFacts, parameters: int, micro_batches: int) -> Stages:
    """Returns the stages that facts.json describes as `pipeline`, of a model of `parameters`.

    A rank keeps what runs before its first backward pass (Narayanan et al., arXiv:2104.04473,
    section 2.2). If gradients of weights are computed later, gradients of activations are kept for
    them: in the pass as many as activations, then half of them.
    """
    schedule, stages = facts["schedule"], facts["stages"]
    p, v = len(stages), len(stages[0])
    is_v = schedule in V_SHAPED
    if schedule == "GPipe":
        most = at_end = float(micro_batches)
    elif schedule in ("1F1B", "Interleaved1F1B"):
        most, at_end = p + (p - 1) * (v > 1) / v, ((v - 1) * p + 1) / v
    elif schedule == "InterleavedZeroBubble":
        most = at_end = p + (p + 1) / v / 2
    else:
        most = at_end = p + 1 / 2
        if schedule == "ZBVZeroBubble":
            most = (3 * p - 1) / 2
    sizes, blocks = [], []  # of each rank
    for own in stages:
        sizes.append(sum(map(facts["parameters"].__getitem__, own)))
        blocks.append(sum(map(facts["blocks"].__getitem__, own)))
    return Stages(
        largest=max(sizes) / parameters,
        mean=sum(sizes) / parameters / p,
        blocks=max(blocks),
        kept=min(most, micro_batches),
        kept_at_end=min(at_end, micro_batches),
        crossings=2 * (p - 1) if is_v else v * p - 1,
    )


def balanced(costs: list[float], last: float, num_stages: int) -> list[int]:
    """Returns how many blocks each stage gets, so that the sum of squared costs is least."""
    sums = [0.0, *accumulate(costs)]
    # best[i]: the least sum of the stages so far over the first i blocks, and their numbers
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(num_stages):
        extra, left = last * (stage == num_stages - 1), num_stages - stage - 1
        found: dict[int, tuple[float, list[int]]] = {}
        for start, (total, counts) in best.items():
            for stop in range(start + 1, len(costs) - left + 1):
                value = total + (sums[stop] - sums[start] + extra) ** 2
                if stop not in found or value < found[stop][0]:
                    found[stop] = value, [*counts, stop - start]
        best = found
    return best[len(costs)][1]
