"""Balances the work of ranks: which rank computes which samples of a global batch.

The samples of a global batch, and with them the loss, do not change; only their assignment does."""

import heapq
from collections.abc import Sequence
from itertools import islice

import numpy as np


def assign(
    costs: Sequence[float] | np.ndarray,
    micro_batches: Sequence[Sequence[int]],
    speeds: Sequence[float],
) -> list[list[list[int]]]:
    """Returns for each rank and micro-batch the indices into `costs` of its samples.

    The samples are sorted, the most expensive first, and each goes to the rank that has spent the
    least time so far (longest processing time first; Graham, 1969), until that rank has all of its
    samples. A rank's first micro-batch has its most expensive samples. So the micro-batches that
    ranks compute at the same time are alike too, as FSDP2 and tensor parallelism need: there, ranks
    wait for each other in every forward pass.

    Args:
        costs: Work of each sample of the global batch, in any unit.
        micro_batches: Number of samples of each rank's micro-batches; their sum is all of `costs`.
        speeds: Relative speed of each rank."""
    order = np.argsort(-np.asarray(costs, dtype=np.float64), kind="stable").tolist()
    totals = [sum(counts) for counts in micro_batches]
    assigned: list[list[int]] = [[] for _ in speeds]
    # A heap of (time spent, rank), of the ranks that do not have all of their samples.
    waiting = [(0.0, rank) for rank in range(len(speeds)) if totals[rank]]
    for sample in order:
        time, rank = heapq.heappop(waiting)
        assigned[rank].append(sample)
        if len(assigned[rank]) < totals[rank]:
            heapq.heappush(waiting, (time + float(costs[sample]) / speeds[rank], rank))
    batches = []
    for samples, counts in zip(assigned, micro_batches, strict=True):
        remaining = iter(samples)
        batches.append([list(islice(remaining, count)) for count in counts])
    return batches


def counts_of(
    samples: int, accumulation: int, speeds: Sequence[float] | None, num_ranks: int
) -> list[list[int]]:
    """Returns the number of samples of each rank's micro-batches of a step: over the step in
    proportion to the rank's speed, and spread evenly over its micro-batches. No micro-batch is
    empty, because ranks that call collectives in each micro-batch must do equally many."""
    if speeds is None:
        speeds = [1.0] * num_ranks
    found = []
    for count in _shared_out(samples, speeds, accumulation):
        ends = [count * number // accumulation for number in range(accumulation + 1)]
        found.append(np.diff(ends).tolist())
    return found


def _shared_out(samples: int, speeds: Sequence[float], least: int) -> list[int]:
    """Returns each rank's number of samples, in proportion to its speed but at least `least`;
    `samples` in total."""
    counts = [0] * len(speeds)
    free = list(range(len(speeds)))  # ranks that are not held at `least`
    while True:
        left = samples - least * (len(speeds) - len(free))
        total = sum(speeds[rank] for rank in free)
        exact = {rank: speeds[rank] * left / total for rank in free}
        held = [rank for rank in free if exact[rank] < least]
        if not held:
            break
        for rank in held:
            counts[rank] = least
            free.remove(rank)
    for rank in free:
        counts[rank] = int(exact[rank])
    # The ranks with the largest remainders get one more; of equal ones, the first.
    by_remainder = sorted(free, key=lambda rank: counts[rank] - exact[rank])
    for rank in by_remainder[: samples - sum(counts)]:
        counts[rank] += 1
    return counts
