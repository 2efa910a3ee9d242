"""Checkpoints hold training's weights, whatever callbacks put into the model at the end or in a validation."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from pytest import CaptureFixture

from tests.support.runs import logged, only_run, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

AVERAGES = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.8"]
FORGETS = ["--trainer.callbacks+=tests.checkpoint.test_averaging.Forgets"]
PAUSES = ["--trainer.callbacks+=tests.support.parity.PauseAfter", "--trainer.callbacks.step=7"]


class Forgets(Callback):
    """Replaces the weights when training ends, as a callback may that exports a model."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for parameter in pl_module.parameters():
            torch.nn.init.zeros_(parameter)


def assert_continued(folder: Path, name: str) -> None:
    """The run `name` has the losses of the run `whole`, and nearly its results: the average of rotary frequencies,
    which no checkpoint has, is rounded in each update."""
    losses, results = (
        [logged(only_run(folder, n), m) for n in ("whole", name)]
        for m in ("train/loss", "eval/loss")
    )
    assert losses[0] == losses[1]
    assert {step: results[1][step] for step in results[0]} == pytest.approx(results[0], rel=1e-6)


@pytest.mark.parametrize("own", [AVERAGES, FORGETS], ids=["averages", "forgets"])
@pytest.mark.parametrize("asynchronous", tiers(["false", "true"], daily=["false"]))
def test_a_run_that_stopped_regularly_resumes_with_trainings_weights(
    flags: list[str], tmp_path: Path, own: list[str], asynchronous: str
) -> None:
    flags = [
        *flags,
        *own,
        f"--last_checkpoint.asynchronous={asynchronous}",
        "--model.optim.learning_rate=0.01",
    ]
    assert run("fit", *flags, "--run.name=whole") == 0
    assert run("fit", *flags, *PAUSES, "--run.name=paused") == 0
    assert run("fit", *flags, "--run.name=paused", "--ckpt_path=last") == 0
    assert_continued(tmp_path, "paused")


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "pp"])
def test_averaging_is_refused_where_the_weights_are_sharded(
    flags: list[str], strategy: str, capfd: CaptureFixture
) -> None:
    assert run("fit", *flags, *flags_of(strategy), "--trainer.devices=2", *AVERAGES) == 2
    assert "trainer.callbacks: EMAWeightAveraging does not work under" in capfd.readouterr().err
