"""What a resume must not lose: random state, unused parameters, weights that callbacks replace."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from pytest import CaptureFixture, MonkeyPatch
from torch import nn
from trainer_dev.module import LanguageModule

from dist_template.callbacks import RandomState
from dist_template.callbacks.random_state import KEY
from tests.support.runs import CONFIGS, logged, newest, only_run, run
from tests.support.tiers import tiers

WITH_DROPOUT = "{model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2, resid_pdrop: 0.3}"


@pytest.mark.slow
def test_validation_does_not_change_what_training_draws(flags: list[str], tmp_path: Path) -> None:
    flags = [*flags, f"--model.architecture={WITH_DROPOUT}"]
    for interval in (4, 20):
        more = [f"--run.name=every{interval}", f"--trainer.val_check_interval={interval}"]
        assert run("fit", *flags, *more) == 0
    losses = [logged(only_run(tmp_path, f"every{interval}"), "train/loss") for interval in (4, 20)]
    assert losses[0] == losses[1]


def trainer(rank: int, world_size: int) -> Any:
    sampler = {"num_replicas": world_size, "rank": rank}
    strategy = SimpleNamespace(distributed_sampler_kwargs=sampler)
    return SimpleNamespace(global_rank=rank, world_size=world_size, strategy=strategy)


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def resume(checkpoint: dict[str, Any], rank: int, world_size: int) -> tuple[float, float, float]:
    """Returns what training draws first on a rank of a run that resumes from `checkpoint`."""
    callback = RandomState()
    callback.setup(trainer(rank, world_size), None, "fit")
    callback.on_load_checkpoint(trainer(rank, world_size), None, checkpoint)
    draws()  # what loaders do before the first batch
    callback.on_train_batch_start(trainer(rank, world_size), None, None, 0)
    return draws()


def test_another_number_of_ranks_starts_new_streams_with_a_warning() -> None:
    checkpoint: dict[str, Any] = {"global_step": 7}
    RandomState().on_save_checkpoint(trainer(0, 1), None, checkpoint)
    assert len(checkpoint[KEY]) == 1
    found = []
    for rank in (0, 1, 0):
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="random state of 1 ranks and there are 2 now"):
            found.append(resume(checkpoint, rank, world_size=2)[0])
    assert found[0] != found[1] and found[0] == found[2]


STEPS, HALF = 4, 2
STRATEGIES = {
    name: [f"--config={CONFIGS}/strategy/{name}.yaml"] for name in ("fsdp2", "zero2", "zero3")
} | {"auto": []}


@pytest.fixture
def with_pooler(monkeypatch: MonkeyPatch) -> None:
    """The model has a pooler that nothing calls, with parameters in both optimizer groups."""
    build = LanguageModule.build_model

    def build_model(self: Any, data: Any) -> nn.Module:
        model: Any = build(self, data)
        model.pooler = nn.Linear(4, 4)
        return model

    monkeypatch.setattr(LanguageModule, "build_model", build_model)


def fit_with(flags: list[str], strategy: str, name: str, steps: int, *more: str) -> int:
    argv = [*STRATEGIES[strategy], *flags, "--trainer.devices=1", "--trainer.limit_val_batches=0"]
    sizes = [
        f"--trainer.max_steps={steps}", "--model.optim.schedule=constant", "--model.optim.warmup=0",
    ]  # fmt: skip
    return run("fit", *argv, f"--run.name={name}", *sizes, *more)


PAIRS = [("fsdp2", "fsdp2"), ("auto", "fsdp2"), ("fsdp2", "auto"), ("fsdp2", "zero3")]


@pytest.mark.slow
@pytest.mark.usefixtures("with_pooler")
@pytest.mark.parametrize(("wrote", "resumes"), tiers(PAIRS, daily=PAIRS[1:]))
def test_a_checkpoint_without_its_moments_is_resumed(
    flags: list[str], tmp_path: Path, capsys: CaptureFixture, wrote: str, resumes: str
) -> None:
    assert fit_with(flags, "auto", "whole", STEPS) == 0
    assert fit_with(flags, wrote, "half", HALF) == 0
    last = newest(only_run(tmp_path, "half"))
    assert fit_with(flags, resumes, "resumed", STEPS, f"--ckpt_path={last}") == 0
    assert "moments start from zero" not in capsys.readouterr().out
    whole, resumed = (logged(only_run(tmp_path, n), "train/loss") for n in ("whole", "resumed"))
    assert resumed == pytest.approx({step: whole[step] for step in (3, 4)}, rel=1e-5)


AVERAGES = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.8"]
FORGETS = ["--trainer.callbacks+=tests.checkpoint.test_resume.Forgets"]
PAUSES = ["--trainer.callbacks+=tests.support.parity.PauseAfter", "--trainer.callbacks.step=7"]


class Forgets(Callback):
    """Replaces the weights when training ends, as a callback may that exports a model."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for parameter in pl_module.parameters():
            torch.nn.init.zeros_(parameter)


def assert_continued(folder: Path, name: str) -> None:
    """The run `name` has the losses of the run `whole`, and nearly its results: the average of
    rotary frequencies, which no checkpoint has, is rounded in each update."""
    runs = [only_run(folder, each) for each in ("whole", name)]
    losses, results = ([logged(r, m) for r in runs] for m in ("train/loss", "eval/loss"))
    assert losses[0] == losses[1]
    assert {step: results[1][step] for step in results[0]} == pytest.approx(results[0], rel=1e-6)


@pytest.mark.parametrize("own", [AVERAGES, FORGETS], ids=["averages", "forgets"])
@pytest.mark.parametrize("asynchronous", tiers(["false", "true"], daily=["false"]))
def test_a_run_that_stopped_regularly_resumes_with_trainings_weights(
    flags: list[str], tmp_path: Path, own: list[str], asynchronous: str
) -> None:
    flags = [
        *flags, *own, f"--last_checkpoint.asynchronous={asynchronous}",
        "--model.optim.learning_rate=0.01",
    ]  # fmt: skip
    assert run("fit", *flags, "--run.name=whole") == 0
    assert run("fit", *flags, *PAUSES, "--run.name=paused") == 0
    assert run("fit", *flags, "--run.name=paused", "--ckpt_path=last") == 0
    assert_continued(tmp_path, "paused")
