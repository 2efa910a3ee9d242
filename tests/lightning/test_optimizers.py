"""Saves, steps and hooks of modules with optimizers of their own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_template.checkpoint import manifest
from dist_template.checkpoint.formats import read_full
from tests.lightning.arms import RANKS, Habit, ours
from tests.support.tiers import tiers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", tiers([*RANKS], daily=["zero2"]))
def test_a_model_checkpoint_with_nested_names_is_written_and_read(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    options = {
        "dirpath": str(folder),
        "filename": "{epoch}/at-{step}",
        "save_top_k": -1,
        "every_n_train_steps": 3,
    }
    saver = json.dumps([{"class_path": "ModelCheckpoint", "init_args": options}])
    habit = Habit(trainer={"max_steps": 9}, flags=(f"--trainer.callbacks={saver}",))
    record = ours(habit, way, tmp_path)
    assert record.ok, record.error
    found = sorted(folder.glob("epoch=*/at-step=*.ckpt"))
    steps = [int(re.findall(r"step=(\d+)", path.name)[0]) for path in found]
    assert sorted(steps) == [3, 6, 9]
    last = next(path for path in found if "step=9" in path.name)
    trained = torch.load(tmp_path / "whole" / "trace0.pt", weights_only=False)["weights"]
    read: Any = read_full(last)["state_dict"]
    for name, weight in trained.items():
        assert torch.equal(torch.as_tensor(read[name]).float(), weight), name


def test_the_steps_of_three_optimizers_are_one_count(tmp_path: Path) -> None:
    """Checkpoints, log steps and the console count what `trainer.global_step` and `max_steps`
    count: the steps of each optimizer."""
    flags = (
        "--last_checkpoint.every_n_steps=4",
        "--last_checkpoint.keep=99",
        "--trainer.log_every_n_steps=4",
        "--console.line_every_s=0",
    )
    record = ours(Habit("ThreeOptimizers", trainer={"max_epochs": 1}, flags=flags), "one", tmp_path)
    assert record.ok, record.error
    # 12 batches of three steps: those that reach a multiple of 4, or pass it, and the last one
    due = [step for step in range(3, 37, 3) if step // 4 > (step - 3) // 4]
    saved = sorted(map(manifest.step_of, (record.run / "checkpoints").glob("step*.ckpt")))
    assert saved == sorted({*due, 36})
    shown = [tuple(map(int, each)) for each in re.findall(r"^step (\d+)/(\d+)", record.log(), re.M)]
    assert [step for step, _ in shown] == due
    assert {total for _, total in shown} == {36}


def test_numerics_that_manual_optimization_does_not_read_are_refused(tmp_path: Path) -> None:
    flags = ("--numerics.on_non_finite=skip",)
    record = ours(Habit("Gan", trainer={"max_epochs": 1}, flags=flags), "one", tmp_path)
    assert "numerics.on_non_finite is 'skip' and has no effect: Gan optimizes" in record.refusal
