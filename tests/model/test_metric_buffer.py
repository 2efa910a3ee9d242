"""The metric buffer: what a value costs, what it must not keep, and what stays out of its way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_template import InputError
from dist_template.model.metrics import FOLD
from tests.support.library import MetricBuffer
from tests.support.operations import Ops
from tests.support.runs import Workers, logged
from tests.support.strategies import flags_of
from tests.support.teacher import WEIGHING

CPU = torch.device("cpu")
NAMES = [f"m{i}" for i in range(10)]


def test_ten_values_a_step_cost_ten_views_and_little_more() -> None:
    """On a GPU each operation but a view would be a kernel; a view needs 1 µs of the host."""
    steps, value, buffer = 2 * FOLD, torch.tensor(1.0, requires_grad=True) * 2, MetricBuffer()
    with Ops() as ops:
        for _ in range(steps):
            for name in NAMES:
                buffer.add(name, value)
    views = ops.seen.pop("aten.detach.default")
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


def test_a_part_of_a_large_tensor_does_not_keep_the_rest() -> None:
    buffer = MetricBuffer()
    buffer.add("part", torch.zeros(1000)[3])
    assert buffer.newest["part"].untyped_storage().nbytes() == 4


def test_ranks_meet_in_one_vector() -> None:
    """Two ranks in one process: each one's vector is added to the other's."""
    buffers = [MetricBuffer(), MetricBuffer()]
    vectors: list[torch.Tensor] = []
    for rank, buffer in enumerate(buffers):
        buffer.add("loss", torch.tensor(1.0 + rank))
        buffer.put_of_rank("time", 0.1 * (rank + 1))
        buffer.put_of_rank("heat", float("nan") if rank else 50.0)
        buffer.put_counts("loads", torch.tensor([rank, 5]))

        def keep(vector: torch.Tensor) -> torch.Tensor:
            vectors.append(vector.clone())
            return vector

        buffer.read(keep, CPU, rank, 2)
    for rank, buffer in enumerate(buffers):
        buffer.add("loss", torch.tensor(1.0 + rank))
        buffer.put_of_rank("time", 0.1 * (rank + 1))
        buffer.put_of_rank("heat", float("nan") if rank else 50.0)
        buffer.put_counts("loads", torch.tensor([rank, 5]))
        assert buffer.read(lambda _: vectors[0] + vectors[1], CPU, rank, 2) == {"loss": 1.5}
        assert buffer.of_ranks["time"] == pytest.approx([0.1, 0.2])
        assert buffer.of_ranks["heat"] == pytest.approx([50.0, float("nan")], nan_ok=True)
        assert buffer.totals == {"loads": [1.0, 10.0]}


WRONG = {"float": 3.0, "None": None, "(3,)": torch.ones(3), "(0,)": torch.ones(0), "str": "loss"}


@pytest.mark.parametrize("kind", WRONG)
def test_a_value_that_is_no_scalar_tensor_is_refused_with_the_users_line(kind: str) -> None:
    buffer: Any = MetricBuffer()
    with pytest.raises(InputError, match=r"`track` of train/mine was given a"):
        buffer.add("train/mine", WRONG[kind])


def test_one_element_of_any_shape_is_a_scalar() -> None:
    buffer = MetricBuffer()
    buffer.add("mine", torch.tensor([[2.0]]))
    buffer.add("mine", torch.tensor(4.0))
    assert buffer.read(lambda t: t, CPU) == {"mine": 3.0}


@pytest.mark.slow
def test_the_norm_of_a_sharded_weight_is_that_of_the_full_one(tmp_path: Path) -> None:
    found = []
    for strategy, ranks in (("ddp", 2), ("fsdp2", 3)):  # 16 rows on 3 ranks
        given = ["fit", f"--run.root={tmp_path / 'runs'}", "--run.report=false", "--trainer.accelerator=cpu"]
        given += [f"--trainer.devices={ranks}", "--trainer.max_steps=4", "--trainer.log_every_n_steps=2"]
        given += [*flags_of(strategy), f"--data.batch_size={12 // ranks}", f"--run.name={strategy}"]
        with Workers(ranks, WEIGHING) as workers:
            run = workers.run(given, tmp_path / strategy).check().run
        found.append({name: logged(run, f"my/{name}") for name in ("norm", "sum", "head")})
    for name, series in found[0].items():
        assert found[1][name] == pytest.approx(series, rel=1e-5), name
