"""data.py: rows are text, labels are the next tokens, a resumed run continues at the next batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist_template.testing import batches, build, this_project

PROJECT = this_project(__file__)
CONFIGS = Path(__file__).parents[1] / "configs"
SMALL = ["--data.seq_len=64", "--data.global_batch_size=4", "--data.micro_batch_size=2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache = f"--data.cache_dir={tmp_path_factory.mktemp('cache')}"
    return build(PROJECT, f"--config={CONFIGS}/quickstart.yaml", *SMALL, cache)[1]


def test_rows_decode_to_text_of_the_source(data: Any) -> None:
    texts = "\n".join(text for _, text in data.source.documents())
    ids = batches(data, 1)[0]["input_ids"][0].tolist()
    decoded = data.text_tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded[:40] in texts


def test_labels_are_the_next_tokens(data: Any) -> None:
    batch = batches(data, 1)[0]
    counted = batch["labels"][:, :-1] != -100
    assert counted.any()
    assert torch.equal(batch["labels"][:, :-1][counted], batch["input_ids"][:, 1:][counted])


def test_a_loss_is_divided_by_the_labels_that_count(data: Any) -> None:
    pair = batches(data, 2)  # the two micro-batches of a global batch
    counted = sum((batch["labels"] != -100).sum().item() for batch in pair)
    assert [batch["tokens_per_micro_batch"].item() for batch in pair] == [counted / 2] * 2


def test_a_resumed_run_sees_the_next_batch(data: Any) -> None:
    uninterrupted = batches(data, 6)
    resumed = batches(data, 2, after=2)  # two global batches are four micro-batches
    for expected, got in zip(uninterrupted[4:], resumed, strict=True):
        assert torch.equal(expected["input_ids"], got["input_ids"])
