"""Divides costs among stages; without torch, for diagnosis."""

from __future__ import annotations

from itertools import accumulate


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
