"""The metric buffer: what a value costs, what it must not keep, and what stays out of its way."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dist_template.model.metrics import FOLD
from tests.support.library import MetricBuffer
from tests.support.modules import Ops

CPU = torch.device("cpu")
NAMES = [f"m{i}" for i in range(10)]


def test_ten_values_a_step_cost_ten_views_and_little_more() -> None:
    """On a GPU each operation but a view would be a kernel; a view needs 1 µs of the host."""
    steps, value, buffer = 2 * FOLD, torch.tensor(1.0, requires_grad=True) * 2, MetricBuffer()
    with Ops() as ops:
        for _ in range(steps):
            for name in NAMES:
                buffer.add(name, value)
    views = ops.seen.pop("detach")
    assert views == len(NAMES) * steps
    assert sum(ops.seen.values()) / steps < 1, "kernels a step, of all ten"


def test_a_mean_loses_no_digit_of_what_was_added() -> None:
    buffer = MetricBuffer()
    values = torch.rand(1000)
    for value in values:
        buffer.add("same", torch.tensor(2.7182818))
        buffer.add("other", value)
    means = buffer.read(lambda t: t, CPU)
    assert means["same"] == torch.tensor(2.7182818).item()
    assert means["other"] == pytest.approx(math.fsum(values.tolist()) / 1000, rel=1e-15)


def test_ranks_meet_in_one_vector() -> None:
    """Two ranks in one process: each one's vector is added to the other's."""
    buffers = [MetricBuffer(), MetricBuffer()]
    vectors: list[torch.Tensor] = []

    def read(reduce: Callable[[torch.Tensor], torch.Tensor], rank: int) -> dict[str, float]:
        buffer = buffers[rank]
        buffer.add("loss", torch.tensor(1.0 + rank))
        buffer.put_of_rank("time", 0.1 * (rank + 1))
        buffer.put_of_rank("heat", float("nan") if rank else 50.0)
        buffer.put_counts("loads", torch.tensor([rank, 5]))
        return buffer.read(reduce, CPU, rank, 2)

    for rank in range(2):
        read(lambda vector: vectors.append(vector.clone()) or vector, rank)
    for rank, buffer in enumerate(buffers):
        assert read(lambda _: vectors[0] + vectors[1], rank) == {"loss": 1.5}
        assert buffer.of_ranks["time"] == pytest.approx([0.1, 0.2])
        assert buffer.of_ranks["heat"] == pytest.approx([50.0, float("nan")], nan_ok=True)
        assert buffer.totals == {"loads": [1.0, 10.0]}
