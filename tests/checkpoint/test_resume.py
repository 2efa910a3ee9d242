"""What a resume must not lose: random state, unused parameters, weights that callbacks replace."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from trainer_dev.module import LanguageModule

from dist_template.callbacks import RandomState
from dist_template.callbacks.random_state import KEY
from tests.support.runs import logged, newest, only_run, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

WITH_DROPOUT = "{model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2, resid_pdrop: 0.3}"
SHORT = ["--trainer.max_steps=8", f"--model.architecture={WITH_DROPOUT}"]


@pytest.mark.slow
def test_validation_does_not_change_what_training_draws(flags: list[str], tmp_path: Path) -> None:
    losses = []
    for interval in (4, 8):
        more = [f"--run.name=every{interval}", f"--trainer.val_check_interval={interval}"]
        assert run("fit", *flags, *SHORT, *more) == 0
        losses.append(logged(only_run(tmp_path, f"every{interval}"), "train/loss"))
    assert losses[0] == losses[1]


def trainer(rank: int, world_size: int) -> Any:
    sampler = {"num_replicas": world_size, "rank": rank}
    strategy = SimpleNamespace(distributed_sampler_kwargs=sampler)
    return SimpleNamespace(global_rank=rank, world_size=world_size, strategy=strategy)


def test_another_number_of_ranks_starts_new_streams_with_a_warning() -> None:
    checkpoint: dict[str, Any] = {"global_step": 7}
    RandomState().on_save_checkpoint(trainer(0, 1), None, checkpoint)
    assert len(checkpoint[KEY]) == 1
    found = []
    for rank in (0, 1, 0):
        torch.manual_seed(0)
        callback, given = RandomState(), (trainer(rank, 2), None)
        callback.setup(*given, "fit")
        with pytest.warns(UserWarning, match="random state of 1 ranks and there are 2 now"):
            callback.on_load_checkpoint(*given, checkpoint)
        torch.rand(1)  # as loaders do before the first batch
        callback.on_train_batch_start(*given, None, 0)
        found.append(torch.rand(1).item())
    assert found[0] != found[1] and found[0] == found[2]


@pytest.fixture
def with_pooler(monkeypatch: Any) -> None:
    """The model has a pooler that nothing calls, with parameters in both optimizer groups."""
    build = LanguageModule.build_model

    def build_model(self: Any, data: Any) -> nn.Module:
        model: Any = build(self, data)
        model.pooler = nn.Linear(4, 4)
        return model

    monkeypatch.setattr(LanguageModule, "build_model", build_model)


@pytest.mark.slow
@pytest.mark.usefixtures("with_pooler")
def test_a_checkpoint_without_moments_is_resumed(flags: Any, tmp_path: Path, capsys: Any) -> None:
    """By the strategy that wrote it and by others, a step each."""
    legs = ["auto", "fsdp2", "fsdp2", "auto", "fsdp2", "zero3"]
    flags = [*flags, "--trainer.limit_val_batches=0", "--model.optim.schedule=constant"]
    flags += ["--model.optim.warmup=0", f"--trainer.max_steps={len(legs)}"]
    assert run("fit", *flags, "--run.name=whole") == 0
    expected = logged(only_run(tmp_path, "whole"), "train/loss")
    checkpoint: list[str] = []
    for step, strategy in enumerate(legs, 1):
        name, chosen = f"leg{step}", [] if strategy == "auto" else flags_of(strategy)
        more = [f"--run.name={name}", f"--trainer.max_steps={step}", "--trainer.devices=1"]
        assert run("fit", *chosen, *flags, *more, *checkpoint) == 0
        losses = logged(only_run(tmp_path, name), "train/loss")
        assert losses == pytest.approx({step: expected[step]}, rel=1e-5), strategy
        checkpoint = [f"--ckpt_path={newest(only_run(tmp_path, name))}"]
    assert "moments start from zero" not in capsys.readouterr().out


AVERAGES = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.8"]
FORGETS = ["--trainer.callbacks+=tests.checkpoint.test_resume.Forgets"]
PAUSES = ["--trainer.callbacks+=tests.support.parity.PauseAfter", "--trainer.callbacks.step=7"]


class Forgets(Callback):
    """Replaces the weights when training ends, as a callback may that exports a model."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for parameter in pl_module.parameters():
            torch.nn.init.zeros_(parameter)


@pytest.mark.slow
@pytest.mark.parametrize("own", [AVERAGES, FORGETS], ids=["averages", "forgets"])
@pytest.mark.parametrize("asynchronous", tiers(["false", "true"], daily=["false"]))
def test_a_run_that_stopped_regularly_resumes_with_trainings_weights(
    flags: list[str], tmp_path: Path, own: list[str], asynchronous: str
) -> None:
    """Nearly: the average of rotary frequencies, which no checkpoint has, is rounded each time."""
    flags = [*flags, *own, f"--last_checkpoint.asynchronous={asynchronous}"]
    flags += ["--model.optim.learning_rate=0.01", "--trainer.max_steps=10"]
    flags += ["--trainer.val_check_interval=5"]
    assert run("fit", *flags, "--run.name=whole") == 0
    assert run("fit", *flags, *PAUSES, "--run.name=paused") == 0
    assert run("fit", *flags, "--run.name=paused", "--ckpt_path=last") == 0
    whole, paused = only_run(tmp_path, "whole"), only_run(tmp_path, "paused")
    assert logged(paused, "train/loss") == logged(whole, "train/loss")
    expected, results = (logged(each, "eval/loss") for each in (whole, paused))
    assert {step: results[step] for step in expected} == pytest.approx(expected, rel=1e-6)
