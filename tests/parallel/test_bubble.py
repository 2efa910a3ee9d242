"""The bubble's formula counts what torch's schedules wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dist_template.parallel.pipeline import costs
from tests.support.library import SCHEDULES, stages_of_rank

Pass = tuple[int, str, int]
UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}  # forward, gradients of inputs, of weights, of both


def orders(name: str, ranks: int, per_rank: int, micro_batches: int) -> list[list[Pass]]:
    """Returns each rank's passes in torch's order: stage, kind, micro-batch."""
    num = ranks * per_rank
    stages = [
        SimpleNamespace(stage_index=i, num_stages=num, group_size=ranks, group_rank=0, is_first=i == 0, is_last=False,
                        submod=None) for i in stages_of_rank(name, 0, ranks, per_rank)
    ]  # fmt: skip
    given: Any = stages[0] if name in costs.ONE_STAGE else stages
    schedule = SCHEDULES[name](given, micro_batches, lambda loss, _: loss, scale_grads=False)
    ranks_passes: list[list[Pass]] = []
    for actions in schedule.pipeline_order.values():
        passes = [part for action in actions if action for part in action.sub_actions or [action]]
        forwards: dict[int, int] = {}
        ranks_passes.append([])
        for stage, computation, number, _ in passes:
            kind = computation.value
            if kind == "F":  # torch's table of 1F1B misnumbers the last rank's
                number = forwards[stage] = forwards.get(stage, -1) + 1
            if kind in UNITS:
                ranks_passes[-1].append((stage, kind, number))
    return ranks_passes


def waiting(name: str, ranks: int, per_rank: int, micro_batches: int) -> float:
    """Returns the time of a step above the time of its passes, in parts of the latter."""
    last, todo = ranks * per_rank - 1, orders(name, ranks, per_rank, micro_batches)
    done: dict[Pass, int] = {}
    clocks = [0] * ranks
    for _ in range(2 * sum(map(len, todo))):
        for rank, passes in enumerate(todo):
            if not passes:
                continue
            stage, kind, number = passes[0]
            needs: list[Pass] = []
            if kind == "F":
                needs = [(stage - 1, "F", number)] * (stage > 0)
            elif kind == "W":
                needs = [(stage, "I", number)]
            else:
                kind = "I"
                needs = [(stage, "F", number)] + [(stage + 1, "I", number)] * (stage < last)
            if all(need in done for need in needs):
                start = max([clocks[rank], *(done[need] for need in needs)])
                clocks[rank] = done[stage, kind, number] = start + UNITS[passes.pop(0)[1]]
    assert not any(todo), "an order that cannot run"
    busy = 3 * micro_batches * per_rank
    return (max(clocks) - busy) / busy


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_what_a_schedule_waits(name: str) -> None:
    per_rank = (1,) if name in costs.ONE_STAGE else (2,) if name in costs.V_SHAPED else (2, 3)
    for num in per_rank:
        for ranks in (2, 4, 8):
            for micro_batches in (2 * ranks, 3 * ranks, 8 * ranks):
                counted = waiting(name, ranks, num, micro_batches)
                assert counted == pytest.approx(costs.bubble(name, ranks * num, num, micro_batches)), (ranks, num)


def test_a_bubble_in_numbers() -> None:
    assert costs.bubble("1F1B", 4, 1, 8) == 3 / 8
    assert costs.bubble("Interleaved1F1B", 8, 2, 8) == 3 / 16
    assert costs.bubble("DualPipeV", 8, 2, 8) == 1 / 16
