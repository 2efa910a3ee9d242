"""What the model is fed, and how its steps fared, in numbers that a person can count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_template.callbacks.training_log import Inputs
from tests.support.library import MetricBuffer
from tests.support.numerics import spoil
from tests.support.runs import logged, only_run, run


def shares(tokens: list[int], labels: list[int], vocab_size: int, step: int = 9) -> dict[str, float]:
    """What is logged of a batch of one row, with log steps at 10, 20 …"""
    buffer = MetricBuffer()
    trainer: Any = SimpleNamespace(log_every_n_steps=10, global_step=step, estimated_stepping_batches=100)
    trainer.datamodule = SimpleNamespace(vocab_size=vocab_size)
    batch = {"input_ids": torch.tensor([tokens]), "labels": torch.tensor([labels])}
    module: Any = SimpleNamespace(metrics=buffer)
    Inputs().on_train_batch_start(trainer, module, batch, 0)
    return buffer.read(lambda t: t, torch.device("cpu"))


def test_counted_and_distinct_tokens_are_shares() -> None:
    assert shares([5, 5, 7, 9], [5, -100, -100, -100], vocab_size=50) == {
        "data/counted_share": 0.25,
        "data/distinct_token_share": 0.75,
    }
    assert shares([0, 1, 1, 0], [-100] * 4, vocab_size=2) == {
        "data/counted_share": 0.0,
        "data/distinct_token_share": 1.0,
    }
    assert shares([1, 2, 3, 4], [1, 2, 3, 4], vocab_size=50, step=8) == {}, "the ninth step is not logged"


def test_skipped_steps_are_counted(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda step: step == 5)
    steps = ["--trainer.max_steps=8", "--trainer.log_every_n_steps=4", "--trainer.limit_val_batches=0"]
    steps += ["--numerics.on_non_finite=skip", "--model.optim.warmup=1"]
    assert run("fit", *flags, *steps) == 0
    folder = only_run(tmp_path)
    assert logged(folder, "health/skipped_steps") == {4: 0, 8: 1}
