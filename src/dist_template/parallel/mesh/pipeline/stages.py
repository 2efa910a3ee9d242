"""The numbers of a pipeline's stages and of their blocks. No torch.

p    ranks of a pipeline          v    stages of each rank          m    micro-batches of a step"""

from itertools import accumulate
from typing import Literal, TypedDict

# torch's. The first three: Narayanan et al., arXiv:2104.04473; then Qi et al., arXiv:2401.10241,
# sections 3 and 6; DualPipeV is DeepSeek's (arXiv:2412.19437; github.com/deepseek-ai/DualPipe).
Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
ONE_STAGE = {"GPipe", "1F1B"}  # on each rank
V_SHAPED = {"ZBVZeroBubble", "DualPipeV"}  # stages go down the ranks and come back
SPLIT_BACKWARD = {"InterleavedZeroBubble", *V_SHAPED}  # weights' gradients in a pass of their own
LayerSplit = Literal["cost", "even"] | list[int]


class StageFacts(TypedDict):
    """What facts.json has of a pipeline."""

    schedule: str
    stages: list[list[int]]  # numbers of each rank's stages
    blocks: list[int]  # of each stage
    parameters: list[int]  # of each stage
    bubble: float  # idle time over compute time of a step with one micro-batch


def stages_per_rank(schedule: str, interleaved: int) -> int:
    """Returns v; in the interleaved schedules it is configured."""
    if schedule in ONE_STAGE:
        return 1
    return 2 if schedule in V_SHAPED else interleaved


def stages_of_rank(schedule: str, rank: int, size: int, per_rank: int) -> list[int]:
    """Returns the numbers of a rank's stages, in order. In a V, rank 0 has the first and the
    last."""
    if schedule in V_SHAPED:
        return [rank, 2 * size - 1 - rank]
    return list(range(rank, size * per_rank, size))


def wrong_layers(layers: list[int], num_stages: int, blocks: int | None) -> str:
    """Returns what is wrong with the blocks that the user gives each stage; "" if nothing is.
    `blocks`: those of the model, if they are known."""
    needs = f"{num_stages} numbers of 1 or more, one for each stage (pp_size x stages per rank)"
    if blocks is not None:
        needs += f", that sum to the model's {blocks} blocks"
    if len(layers) != num_stages:
        wrong = f"has {len(layers)} numbers"
    elif min(layers) < 1:
        wrong = f"gives a stage {min(layers)} blocks"
    elif blocks is not None and sum(layers) != blocks:
        wrong = f"sums to {sum(layers)}"
    else:
        return ""
    return f"pp_layers {layers} {wrong}: give {needs}, or cost, or even"


def needed_micro_batches(schedule: str, size: int) -> tuple[int, int]:
    """Returns the least number of micro-batches of a step, and the number that it is a multiple
    of. torch (2.13) takes other numbers in interleaved schedules too, which then wait longer."""
    if schedule.startswith("Interleaved"):
        return size, size
    return {"1F1B": size, "DualPipeV": 2 * size}.get(schedule, 1), 1


def bubble(schedule: str, size: int, per_rank: int, micro_batches: int) -> float:
    """Returns a rank's idle time over its compute time.

    A rank waits for p - 1 passes of one of its stages before it starts or after it ends. In GPipe
    and the 1F1B schedules they are forward and backward passes, 3 units of time each:
    (p - 1) / (v m). The others compute gradients of weights meanwhile and wait for 1 unit each:
    (p - 1) / (3 v m).

    Exact for torch's orders of passes, if a stage's forward pass, its inputs' gradients and its
    weights' gradients take the same time each, messages take none, and m is p or more
    (ZBVZeroBubble: 3 p / 2; DualPipeV: 2 p)."""
    units = 3 if schedule in SPLIT_BACKWARD else 1
    return (size - 1) / (units * per_rank * micro_batches)


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
    each stage."""
    return {
        "schedule": schedule,
        "stages": [stages_of_rank(schedule, rank, size, per_rank) for rank in range(size)],
        "blocks": blocks,
        "parameters": parameters,
        "bubble": bubble(schedule, size, per_rank, 1),  # divided by the micro-batches
    }
