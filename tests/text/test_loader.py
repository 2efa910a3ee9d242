"""The number of counted labels in a global batch is known on all ranks before the first forward pass of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_template.text import loader
from dist_template.text.loader import COUNTED, StepLoader, tokens_per_micro_batch

LABELS = [3, 8, 1, 2, 5]  # labels that count, in each batch of 8
CPU = torch.device("cpu")


def read(accumulation: int) -> list[dict[str, Tensor]]:
    rows = [{"labels": torch.from_numpy(np.where(np.arange(8) < counted, 7, -100))} for counted in LABELS]
    return list(StepLoader(rows, accumulation, batch_size=None))


def test_the_first_batch_of_a_step_has_the_count_of_the_step() -> None:
    assert [batch.get(COUNTED) for batch in read(2)] == [11, None, 3, None, 5]
    assert [batch.get(COUNTED) for batch in read(1)] == LABELS


def test_an_evaluation_has_no_steps() -> None:
    batches = read(0)
    assert len(batches) == len(LABELS) and not [batch for batch in batches if COUNTED in batch]


def test_labels_that_a_transform_masks_do_not_count() -> None:
    rows = [{"labels": torch.arange(8)} for _ in range(2)]
    def mask(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"labels": batch["labels"].index_fill(0, torch.arange(3), -100)}

    assert [batch.get(COUNTED) for batch in StepLoader(rows, 2, mask, batch_size=None)] == [10, None]


class TwoRanks:
    """In place of torch.distributed: the other rank has 10 labels more."""

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return 2

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.add_(tensor + 10)


def test_the_mean_is_over_ranks_and_micro_batches_and_at_least_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens_per_micro_batch(12, 4, CPU).item() == 3
    assert tokens_per_micro_batch(0, 1, CPU).item() == 1
    monkeypatch.setattr(loader, "dist", TwoRanks())
    assert tokens_per_micro_batch(11, 2, CPU).item() == (11 + 21) / 2 / 2
