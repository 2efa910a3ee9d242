"""The number of counted labels in a global batch is known on all ranks before the first forward pass of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_dev.data import DataModule

from dist_template.text.batches import loader
from tests.support.runs import quiet

LABELS = [3, 8, 1, 2, 5]  # labels that count, in each batch of 8
CPU = torch.device("cpu")


def read(accumulation: int) -> list[dict[str, Any]]:
    rows = [{"labels": torch.from_numpy(np.where(np.arange(8) < counted, 7, -100))} for counted in LABELS]
    return list(loader.StepLoader(rows, accumulation, batch_size=None))


def test_the_first_batch_of_a_step_has_its_count() -> None:
    assert [batch.get(loader.COUNTED) for batch in read(2)] == [11, None, 3, None, 5]
    assert [batch[loader.COUNTED] for batch in read(1)] == LABELS


def test_an_evaluation_has_no_steps() -> None:
    batches = read(0)
    assert len(batches) == len(LABELS) and not [batch for batch in batches if loader.COUNTED in batch]


def test_labels_that_a_transform_masks_do_not_count() -> None:
    rows = [{"labels": torch.arange(8)} for _ in range(2)]

    def mask(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"labels": batch["labels"].index_fill(0, torch.arange(3), -100)}

    first, second = loader.StepLoader(rows, 2, mask, batch_size=None)
    assert first[loader.COUNTED] == 10 and loader.COUNTED not in second


def test_the_mean_is_over_ranks_and_at_least_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loader.tokens_per_micro_batch(12, 4, CPU).item() == 3
    assert loader.tokens_per_micro_batch(0, 1, CPU).item() == 1
    others = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "all_reduce": lambda total: total.add_(10)}
    monkeypatch.setattr(loader, "dist", SimpleNamespace(**others))
    assert loader.tokens_per_micro_batch(22, 4, CPU).item() == 4


def test_memory_is_pinned_for_the_gpu_that_trains(data: DataModule, monkeypatch: pytest.MonkeyPatch) -> None:
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
