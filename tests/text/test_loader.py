"""The number of counted labels in a global batch is known on all ranks before the first forward pass of a step,
and no rank waits for it."""

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
    rows = [
        {"labels": torch.from_numpy(np.where(np.arange(8) < counted, 7, -100))}
        for counted in LABELS
    ]
    return list(loader.StepLoader(rows, accumulation, batch_size=None))


def steps(accumulation: int) -> list[loader.Counted]:
    return [batch[loader.COUNTED] for batch in read(accumulation) if loader.COUNTED in batch]


def test_the_first_batch_of_a_step_has_the_counts_of_the_step_and_the_next() -> None:
    assert [loader.COUNTED in batch for batch in read(2)] == [True, False, True, False, True]
    assert steps(2) == [
        loader.Counted(11, 3, True), loader.Counted(3, 5, False), loader.Counted(5, None, False),
    ]  # fmt: skip
    assert [counted.step for counted in steps(1)] == LABELS


class TwoRanks:
    """In place of torch.distributed: the other rank has 10 labels more; sums are there after a wait."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return 2

    def all_reduce(self, tensor: Tensor, async_op: bool) -> Any:
        assert async_op
        name = f"{tensor.item():.0f}"
        self.calls.append(f"start {name}")

        class Work:
            def wait(_) -> None:
                self.calls.append(f"wait {name}")
                tensor.add_(tensor + 10)

        return Work()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    ranks = TwoRanks()
    monkeypatch.setattr(loader, "dist", ranks)
    return ranks


def test_the_sum_starts_a_step_early(ranks: TwoRanks) -> None:
    tokens, means, calls = loader.TokensPerMicroBatch(), [], []
    for counted in steps(2):
        means.append(tokens.of(counted, 2, CPU).item())
        calls.append(ranks.calls[:])
        ranks.calls.clear()
    assert means == [(11 + 21) / 2 / 2, (3 + 13) / 2 / 2, (5 + 15) / 2 / 2]
    assert calls == [["start 11", "wait 11", "start 3"], ["wait 3", "start 5"], ["wait 5"]]


def test_memory_is_pinned_for_the_gpu_that_trains(data: DataModule, monkeypatch: Any) -> None:
    """Not on a machine with GPUs whose training uses CPUs: each rank would start CUDA on the first GPU."""
    data.prepare(report=quiet)
    data.setup("fit")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("cpu", "cuda"):
        strategy = SimpleNamespace(root_device=torch.device(name))
        data.trainer = SimpleNamespace(strategy=strategy)
        assert data._loader(data.rows_of("train"), [[0]], 0).pin_memory == (name == "cuda")
    data.trainer = None
    assert not data._loader(data.rows_of("train"), [[0]], 0).pin_memory


def log_normal(number: int, median: float, sigma: float, seed: int = 0) -> np.ndarray:
    """Lengths of conversations: a log-normal distribution describes published sets well."""
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(median), sigma, number))
    return np.maximum(lengths.astype(np.int64), 8)


@pytest.mark.parametrize(
    ("median", "sigma", "seq_len"), [(250, 0.9, 2048), (700, 0.8, 4096), (60, 1.2, 1024)]
)
def test_rows_are_at_least_98_percent_full_and_hold_every_item_once(
    median: int, sigma: float, seq_len: int
) -> None:
    sizes = np.minimum(log_normal(20_000, median, sigma), seq_len)
    rows = best_fit(sizes, seq_len)
    assert sorted(item for row in rows for item in row) == [*range(len(sizes))]
    assert max(int(sizes[row].sum()) for row in rows) <= seq_len
    assert sizes.sum() / (len(rows) * seq_len) >= 0.98
