"""Metrics that differ by rank: every rank, and every page, has those of all ranks."""

import json
from pathlib import Path

import pytest

from tests.lightning.arms import Habit, ours, read

pytestmark = pytest.mark.slow

RANKS = Habit(
    "RankMetrics",
    "TwoValidations",
    {"max_epochs": 2},
    flags=(
        "--best_checkpoint.monitor=val_rank/dataloader_idx_1",
        "--best_checkpoint.mode=max",
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=train_rank",
        "--trainer.callbacks.patience=9",
    ),
)


def test_metrics_of_an_epoch_are_of_all_ranks(tmp_path: Path) -> None:
    """On two ranks `self.log("val_rank", self.global_rank)` is 0.5 on both, and where it is logged;
    some are logged by one rank alone, and nothing waits for the other."""
    ours(RANKS, "ddp", tmp_path).check()
    traces = read(tmp_path / "whole")
    expected = {
        "val_rank": 0.5,
        "val_highest": 1.0,
        "val_lowest": 0.0,
        "val_of_last": 7.0,
        "val_uneven": 1.0,
    }
    for loader, batches in (0, 4.0), (1, 2.0):  # of both ranks
        for trace in traces:
            names = [*expected, "val_total"]
            found = {name: trace["metrics"][f"{name}/dataloader_idx_{loader}"] for name in names}
            assert found == expected | {"val_total": batches}
        assert traces[0]["metrics"][f"val_of_first/dataloader_idx_{loader}"] == 5.0
    assert all(trace["metrics"]["train_rank"] == 0.5 for trace in traces)
    (path,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    logged = {name: value for line in lines for name, value in line.items()}
    assert logged["val_rank/dataloader_idx_1"] == logged["train_rank"] == 0.5
    assert logged["val_of_last/dataloader_idx_0"] == 7.0
    (best,) = tmp_path.rglob("best-step*.ckpt")
    assert json.loads((best / "manifest.json").read_text())["score"] == 0.5
