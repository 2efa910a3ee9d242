"""Statistics of the data before training: masked labels, train text in the validation split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trainer_dev.data import DataModule

from dist_template.text.cache.data_stats import data_statistics, duplicate_share
from tests.support.library import PackedRows
from tests.support.runs import quiet


def some_tokens(num: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 5000, num).astype(np.uint16)


def test_copied_text_is_found_at_any_position() -> None:
    train, validation = some_tokens(200_000, 0), some_tokens(20_000, 1)
    assert duplicate_share(train, validation, 64) == 0.0
    validation[3_001:13_001] = train[100_007:110_007]  # half of it, from another place
    assert duplicate_share(train, validation, 64) == pytest.approx(0.5, abs=0.06)
    assert duplicate_share(train, validation[:0], 64) is None


def test_a_phrase_of_a_few_tokens_is_no_copy() -> None:
    train, validation = some_tokens(200_000, 0), some_tokens(20_000, 1)
    for start in range(0, 20_000, 100):
        validation[start : start + 40] = train[start : start + 40]
    assert duplicate_share(train, validation, 64) == 0.0


def test_the_statistics_are_of_the_rows_that_training_reads(data: DataModule, monkeypatch: Any) -> None:
    data.prepare(report=quiet)
    facts: Any = data_statistics(data)
    assert facts["counted_share"] == 1.0 and facts["unshifted_share"] < 0.1 and facts["distinct_tokens"] > 10
    assert facts["duplicate_share"] > 0.2  # the texts repeat the same sentences
    read = PackedRows.__getitems__

    def half_masked(self: PackedRows, rows: list[int]) -> dict[str, Any]:
        batch = read(self, rows)
        return batch | {"labels": batch["labels"].index_fill(1, torch.arange(16), -100)}

    monkeypatch.setattr(PackedRows, "__getitems__", half_masked)
    assert data_statistics(data)["counted_share"] == 0.5
    monkeypatch.setattr(PackedRows, "__getitems__", lambda self, rows: {"pixels": torch.zeros(len(rows), 3)})
    assert data_statistics(data) == {}
