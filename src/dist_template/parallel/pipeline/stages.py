"""The numbers of a pipeline's stages and of their blocks. No torch.

p    ranks of a pipeline          v    stages of each rank          m    micro-batches of a step"""

from itertools import accumulate
from typing import Literal, TypedDict

Schedule = Literal["1F1B", "Interleaved1F1B"]  # of torch (Narayanan et al., arXiv:2104.04473)
Layers = Literal["cost", "even"] | list[int]


class StageFacts(TypedDict):
    """What facts.json has of a pipeline."""

    schedule: str
    stages: list[list[int]]  # numbers of each rank's stages
    blocks: list[int]  # of each stage
    parameters: list[int]  # of each stage
    bubble: float  # idle time over compute time of a step with one micro-batch


def stages_per_rank(schedule: str, interleaved: int) -> int:
    """Returns v; in the interleaved schedule it is configured."""
    return 1 if schedule == "1F1B" else interleaved


def bounds_between(counts: list[int]) -> list[tuple[int, int]]:
    """Returns the first block of each stage and one more than its last, of numbers of blocks."""
    ends = [*accumulate(counts)]
    return list(zip([0, *ends], ends, strict=False))


def divided(blocks: int, last: float, num_stages: int) -> list[int]:
    """Returns how many blocks each stage gets, if what follows the blocks costs as much as `last`
    of them."""
    at_end = round((blocks + last) / num_stages - last)
    at_end = min(max(at_end, 1), blocks - num_stages + 1)
    each, more = divmod(blocks - at_end, max(num_stages - 1, 1))
    return [each + 1] * more + [each] * (num_stages - 1 - more) + [at_end]


def stage_facts(
    schedule: str, size: int, per_rank: int, blocks: list[int], parameters: list[int]
) -> StageFacts:
    """Returns what facts.json has of a pipeline of `size` ranks, by the blocks and parameters of
    each stage. A rank waits for p - 1 passes of one of its stages before it starts or after it
    ends, forward and backward: (p - 1) / (v m) of its compute time, if all stages take the same
    time."""
    return {
        "schedule": schedule,
        "stages": [list(range(rank, size * per_rank, size)) for rank in range(size)],
        "blocks": blocks,
        "parameters": parameters,
        "bubble": (size - 1) / per_rank,  # divided by the micro-batches
    }
