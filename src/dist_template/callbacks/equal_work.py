"""Balances the work of ranks: which rank computes which samples of a global batch.

The samples of a global batch, and with them the losses, do not change; only their assignment does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def assign(
    costs: Sequence[float] | np.ndarray,
    accumulation: int,
    samples_of_ranks: Sequence[int],
    speeds: Sequence[float],
) -> list[list[list[int]]]:
    """Returns for each rank and micro-batch the indices into `costs` of its samples.

    The samples are sorted, the most expensive first, and each goes to the rank with the least work so far (longest
    processing time first; Graham, 1969), until that has all of its samples. A rank's first micro-batch has its most
    expensive samples. So the micro-batches that ranks compute at the same time are alike too, as FSDP2 and tensor
    parallelism need: there ranks wait for each other in every forward pass.

    Args:
        costs: Work of each sample of the global batch, in any unit.
        accumulation: Micro-batches per rank.
        samples_of_ranks: Samples in each rank's micro-batch; times `accumulation` all of `costs`.
        speeds: Relative speed of each rank.
    """
    order = np.argsort(-np.asarray(costs, dtype=np.float64), kind="stable").tolist()
    assigned: dict[int, list[int]] = {}
    least = [(0.0, rank) for rank in range(len(speeds))]  # a heap of (time so far, rank)
    for sample in order:
        time, rank = heapq.heappop(least)
        samples = assigned.setdefault(rank, [])
        samples.append(sample)
        if len(samples) < accumulation * samples_of_ranks[rank]:
            heapq.heappush(least, (time + float(costs[sample]) / speeds[rank], rank))
    batches = []
    for rank, count in enumerate(samples_of_ranks):
        starts = range(0, accumulation * count, count)
        batches.append([assigned[rank][at : at + count] for at in starts])
    return batches


def shared_out(samples: int, speeds: Sequence[float]) -> list[int]:
    """Returns each rank's number of samples: in proportion to its speed, `samples` in total."""
    exact = np.array(speeds) * samples / sum(speeds)
    counts = exact.astype(int)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: samples - counts.sum()]] += 1
    return counts.tolist()
