"""The counted labels of a global batch are known on all ranks before a step, and no rank waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_dev.data import DataModule

from dist_template.text.batches import loader
from dist_template.text.batches.rows import best_fit
from tests.support.runs import quiet

LABELS = [3, 8, 1, 2, 5]  # labels that count, in each batch of 8
CPU = torch.device("cpu")


def read(accumulation: int) -> list[dict[str, Any]]:
    labels = (torch.from_numpy(np.where(np.arange(8) < counted, 7, -100)) for counted in LABELS)
    rows = [{"labels": each} for each in labels]
    return list(loader.StepLoader(rows, accumulation, batch_size=None))


def steps(accumulation: int) -> list[loader.Counted]:
    return [batch[loader.COUNTED] for batch in read(accumulation) if loader.COUNTED in batch]


def test_the_first_batch_of_a_step_has_the_counts_of_the_step_and_the_next() -> None:
    assert [loader.COUNTED in batch for batch in read(2)] == [True, False, True, False, True]
    assert steps(2) == [
        loader.Counted(11, 3, True), loader.Counted(3, 5, False), loader.Counted(5, None, False),
    ]  # fmt: skip
    assert [counted.step for counted in steps(1)] == LABELS


def test_the_sum_starts_a_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has 10 labels more; sums come after a wait."""
    calls: list[str] = []

    def all_reduce(tensor: Tensor, async_op: bool) -> Any:
        assert async_op
        calls.append(f"start {tensor.item():.0f}")
        return SimpleNamespace(wait=lambda: calls.append("wait") or tensor.add_(tensor + 10))

    ranks: Any = {"is_initialized": lambda: True, "get_world_size": lambda: 2}
    monkeypatch.setattr(loader, "dist", SimpleNamespace(all_reduce=all_reduce, **ranks))
    tokens, means = loader.TokensPerMicroBatch(), []
    for counted in steps(2):
        means.append(tokens.of(counted, 2, CPU).item())
        calls.append("step")
    assert means == [(11 + 21) / 2 / 2, (3 + 13) / 2 / 2, (5 + 15) / 2 / 2]
    assert calls[:4] == ["start 11", "wait", "start 3", "step"]
    assert calls[4:] == ["wait", "start 5", "step", "wait", "step"]


def test_memory_is_pinned_for_the_gpu_that_trains(data: DataModule, monkeypatch: Any) -> None:
    """Not for a training on CPUs beside GPUs: each rank would start CUDA on the first GPU."""
    data.prepare(report=quiet)
    data.setup("fit")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("cpu", "cuda"):
        data.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(name)))
        assert data._loader(data.rows_of("train"), [[0]], 0).pin_memory == (name == "cuda")


@pytest.mark.parametrize(("median", "sigma", "seq_len"), [(250, 0.9, 2048), (60, 1.2, 1024)])
def test_rows_are_98_percent_full_and_complete(median: int, sigma: float, seq_len: int) -> None:
    """A log-normal distribution describes the lengths of published conversations well."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(median), sigma, 20_000))
    sizes = np.clip(lengths.astype(np.int64), 8, seq_len)
    rows = best_fit(sizes, seq_len)
    assert sorted(item for row in rows for item in row) == [*range(len(sizes))]
    assert max(int(sizes[row].sum()) for row in rows) <= seq_len
    assert sizes.sum() / (len(rows) * seq_len) >= 0.98
