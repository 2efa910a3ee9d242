"""The bubble's formula counts what torch's schedules wait."""

from types import SimpleNamespace
from typing import Any

import pytest

from dist_template.parallel.pipeline.stages import stage_facts, stages_per_rank
from tests.support.library import SCHEDULES

UNITS = {"F": 1, "B": 2}  # of time: forward, backward
Pass = tuple[int, str, int]  # stage, kind, micro-batch


def orders(name: Any, ranks: int, per_rank: int, micro_batches: int) -> list[list[Pass]]:
    num = ranks * per_rank
    rest: Any = {"num_stages": num, "group_size": ranks, "group_rank": 0}
    rest |= {"is_last": False, "submod": None}
    indices = range(0, num, ranks)
    stages: Any = [SimpleNamespace(stage_index=i, is_first=i == 0, **rest) for i in indices]
    given = stages if per_rank > 1 else stages[0]
    schedule = SCHEDULES[name](given, micro_batches, lambda loss, _: loss, scale_grads=False)
    found: list[list[Pass]] = []
    for actions in schedule.pipeline_order.values():
        forwards: dict[int, int] = {}
        found.append([])
        for stage, computation, number, *_ in filter(None, actions):
            if computation.value == "F":  # torch's table of 1F1B misnumbers the last rank's
                number = forwards[stage] = forwards.get(stage, -1) + 1
            if computation.value in UNITS:
                found[-1].append((stage, computation.value, number))
    return found


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
            needs = [(stage - 1, "F", number)] * (stage > 0)
            if kind == "B":
                needs = [(stage, "F", number)] + [(stage + 1, "B", number)] * (stage < last)
            if all(need in done for need in needs):
                start = max([clocks[rank], *(done[need] for need in needs)])
                clocks[rank] = done[stage, kind, number] = start + UNITS[kind]
                passes.pop(0)
    assert not any(todo), "an order that cannot run"
    busy = 3 * micro_batches * per_rank
    return (max(clocks) - busy) / busy


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_what_a_schedule_waits(name: str) -> None:
    for per_rank in {stages_per_rank(name, 2), stages_per_rank(name, 3)}:
        for ranks in (2, 4, 8):
            for micro_batches in (2 * ranks, 3 * ranks, 8 * ranks):
                bubble = stage_facts(name, ranks, per_rank, [], [])["bubble"] / micro_batches
                found = waiting(name, ranks, per_rank, micro_batches)
                assert found == pytest.approx(bubble), (ranks, per_rank)
