"""What a resume must not lose, and what it compares with what its checkpoint was trained on."""

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
from dist_template.checkpoint import identity
from tests.support.library import manifest, read_full
from tests.support.runs import OURS, SMALL_LLAMA, logged, newest, only_run, refused, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers
from tests.support.wings import export

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


ON = ["--ckpt_path=last", "--trainer.max_steps=4"]
FIXED = {  # each change, and what is said of it
    "data.seq_len=16": "data.seq_len 32, now 16",
    "data.seed=3": "data.seed 0, now 3",
    "data.cross_document_attention=true": "data.cross_document_attention False, now True",
    "data.validation_share=0.3": "data.source",
    "model.architecture.num_attention_heads=4": "model.architecture.num_attention_heads 2, now 4",
    "model.adapter.alpha=16": "model.adapter.alpha 8.0, now 16.0",
}


@pytest.fixture
def steps(flags: list[str]) -> list[str]:
    more = ["--trainer.max_steps=2", "--trainer.logger=false", "--model.optim.warmup=1"]
    return [*flags, *more, "--model.sample_tokens=1", "--trainer.val_check_interval=2"]


@pytest.mark.slow
def test_a_changed_setting_is_refused_or_accepted(steps: Any, tmp_path: Path, capfd: Any) -> None:
    flags = [*steps, "--model.adapter.alpha=8", "--model.adapter.targets=[q_proj]"]
    assert run("fit", *flags) == 0
    before = sorted(path.name for path in only_run(tmp_path).iterdir())
    for change, said in FIXED.items():
        assert run("prepare", *flags, f"--{change}") == 0
        error = refused("fit", [*flags, *ON, f"--{change}"], capfd)
        assert f"was trained with {said}" in error
        assert f"--last_checkpoint.accept_changes '[{said.split()[0]}" in error
    assert sorted(path.name for path in only_run(tmp_path).iterdir()) == before
    capfd.readouterr()
    accepted = "--last_checkpoint.accept_changes=[data.seq_len,data.seed]"
    assert run("fit", *flags, *ON, "--data.seq_len=16", "--data.seed=3", accepted) == 0
    shown = capfd.readouterr().out
    assert "data.seq_len 32 -> 16\n" in shown and "data.seed 0 -> 3\n" in shown
    assert manifest.read(newest(only_run(tmp_path)))[identity.KEY]["data.seq_len"] == 16


@pytest.mark.slow
def test_another_model_is_refused(steps: Any, tmp_path: Path, capfd: Any) -> None:
    """The weights of llama, mistral and granite have the same names and shapes."""
    assert run("fit", *steps) == 0
    for kind in ("mistral", "granite"):
        architecture = SMALL_LLAMA.replace("llama", kind).replace("}", ", attention_dropout: 0.1}")
        error = refused("fit", [*steps, *ON, f"--model.architecture={architecture}"], capfd)
        assert f"was trained with model.architecture.model_type llama, now {kind}: restore" in error
    extra = SMALL_LLAMA.replace("}", ", extra: {scale: 2}}")
    error = refused("fit", [*steps, *ON, f"--model.architecture={extra}"], capfd)
    assert "model.architecture.scale None, now 2" in error
    ours = [flag for flag in steps if not flag.startswith("--trainer.")]
    export.main(["export", *ours, "--checkpoint=last", f"--output={tmp_path}/out"], OURS)
    pretrained = [*steps, f"--model.pretrained={tmp_path}/out"]
    config = tmp_path / "out" / "config.json"
    original = config.read_text()
    config.write_text(original.replace("10000.0", "500.0"))
    error = refused("fit", [*pretrained, *ON], capfd)
    assert "model.pretrained.rope_parameters.rope_theta 10000.0, now 500.0" in error
    config.write_text(original)
    assert run("fit", *pretrained, *ON) == 0


KEPT = " (no effect: a resume keeps the checkpoint's)"
PRINTED = {
    "--model.optim.learning_rate=0.01": f"model.optim.learning_rate 0.0003 -> 0.01{KEPT}",
    "--model.optim.weight_decay=0.5": f"model.optim.weight_decay 0.1 -> 0.5{KEPT}",
    "--model.optim.betas=[0.5,0.6]": f"model.optim.betas [0.9, 0.95] -> [0.5, 0.6]{KEPT}",
    "--model.optim.schedule=constant": "model.optim.schedule cosine -> constant",
    "--trainer.gradient_clip_val=0.5": "trainer.gradient_clip_val 1.0 -> 0.5",
    "--trainer.precision=bf16-mixed": "trainer.precision 32-true -> bf16-mixed",
}


@pytest.mark.slow
def test_what_changes_the_updates_is_printed(steps: Any, tmp_path: Path, capfd: Any) -> None:
    def resumed(*change: str) -> list[str]:
        capfd.readouterr()
        assert run("fit", *steps, "--ckpt_path=last", *change) == 0
        lines = capfd.readouterr().out.splitlines()
        return [line for line in lines if " -> " in line and not line.startswith(" ")]

    def group() -> dict[str, Any]:
        return read_full(newest(only_run(tmp_path)))["optimizer_states"][0]["param_groups"][0]

    assert run("fit", *steps) == 0
    before = group()
    assert resumed("--trainer.max_steps=3") == []
    assert sorted(resumed("--trainer.max_steps=4", *PRINTED)) == sorted(PRINTED.values())
    assert group()["betas"] == before["betas"] and group()["weight_decay"] == before["weight_decay"]
    settings = manifest.read(newest(only_run(tmp_path)))[identity.KEY]
    assert settings["model.optim.betas"] == [0.9, 0.95]
    sgd = ["--optimizer=torch.optim.SGD", "--optimizer.momentum=0.9"]
    error = refused("fit", [*steps, *ON, *sgd], capfd)
    assert "was trained with optimizer AdamW, now SGD: restore" in error
    assert "accept_changes '[optimizer]'" in error
    sgd += ["--last_checkpoint.accept_changes=[optimizer]"]
    assert "optimizer AdamW -> SGD" in resumed("--trainer.max_steps=9", *sgd)
    assert group()["momentum"] == 0.9
    assert manifest.read(newest(only_run(tmp_path)))[identity.KEY]["optimizer"] == "SGD"
    muon = ["--model.optim.optimizer=muon"]
    assert "optimizer SGD, now Muon: restore" in refused("fit", [*steps, *ON, *muon], capfd)
    muon.append(sgd[-1])
    assert "optimizer SGD -> Muon" in resumed("--trainer.max_steps=11", *muon)
    assert group()["ns_steps"] == 5 and group()["initial_lr"] == before["initial_lr"]
